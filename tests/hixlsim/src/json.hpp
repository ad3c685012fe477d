// As much of JSON as HIXL's options and notifications need.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace sim {

struct Json {
    enum class Kind { null, boolean, integer, real, text, list, object };
    Kind kind = Kind::null;
    bool boolean = false;
    int64_t integer = 0;
    double real = 0;
    std::string text;
    std::vector<Json> list;
    std::map<std::string, Json> object;

    // False: not JSON.
    static bool parse(const std::string &text, Json &value);
    const Json *find(const std::string &key) const;
};

// What a notification's text goes through on its way: false when it is not UTF-8.
bool is_utf8(const std::string &text);

}  // namespace sim
