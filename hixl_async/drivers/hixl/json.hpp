// The part of JSON that the checks of options need.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hx {

struct Json {
    enum Kind { NOTHING, BOOLEAN, NUMBER, STRING, LIST, OBJECT };
    Kind kind = NOTHING;
    bool truth = false;
    std::string text;  // STRING: the value; NUMBER: as it was written
    std::vector<Json> items;
    std::vector<std::pair<std::string, Json>> fields;

    const Json *field(const std::string &name) const;
    // Numbers may be quoted, as HIXL allows.
    bool number(double &out) const;

    // Return false, with the reason in `error`, if `text` is no JSON.
    static bool parse(const std::string &text, Json &out, std::string &error);
};

}  // namespace hx
