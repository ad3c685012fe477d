#include <cctype>
#include <cstdint>
#include <cstdlib>

#include "json.hpp"

namespace sim {
namespace {

class Parser {
  public:
    explicit Parser(const std::string &text) : at_(text.c_str()), end_(text.c_str() + text.size()) {}

    bool whole(Json &value) {
        if (!any(value, 0)) {
            return false;
        }
        space();
        return at_ == end_;
    }

  private:
    void space() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) {
            ++at_;
        }
    }

    bool take(char c) {
        space();
        if (at_ == end_ || *at_ != c) {
            return false;
        }
        ++at_;
        return true;
    }

    bool word(const char *text) {
        const char *p = at_;
        for (; *text != '\0'; ++text, ++p) {
            if (p == end_ || *p != *text) {
                return false;
            }
        }
        at_ = p;
        return true;
    }

    bool any(Json &value, int depth) {
        space();
        if (at_ == end_ || depth > 64) {
            return false;
        }
        switch (*at_) {
            case '{':
                return object(value, depth);
            case '[':
                return list(value, depth);
            case '"':
                value.kind = Json::Kind::text;
                return string(value.text);
            case 't':
            case 'f':
                value.kind = Json::Kind::boolean;
                value.boolean = *at_ == 't';
                return word(value.boolean ? "true" : "false");
            case 'n':
                return word("null");
            default:
                return number(value);
        }
    }

    bool object(Json &value, int depth) {
        value.kind = Json::Kind::object;
        ++at_;
        if (take('}')) {
            return true;
        }
        do {
            std::string key;
            space();
            if (at_ == end_ || *at_ != '"' || !string(key) || !take(':') || !any(value.object[key] = Json(), depth + 1)) {
                return false;
            }
        } while (take(','));
        return take('}');
    }

    bool list(Json &value, int depth) {
        value.kind = Json::Kind::list;
        ++at_;
        if (take(']')) {
            return true;
        }
        do {
            value.list.emplace_back();
            if (!any(value.list.back(), depth + 1)) {
                return false;
            }
        } while (take(','));
        return take(']');
    }

    bool string(std::string &text) {
        for (++at_; at_ != end_ && *at_ != '"'; ++at_) {
            if (static_cast<unsigned char>(*at_) < 0x20) {
                return false;
            }
            if (*at_ != '\\') {
                text += *at_;
                continue;
            }
            if (++at_ == end_) {
                return false;
            }
            switch (*at_) {
                case 'n': text += '\n'; break;
                case 't': text += '\t'; break;
                case 'r': text += '\r'; break;
                case 'b': text += '\b'; break;
                case 'f': text += '\f'; break;
                case '"':
                case '\\':
                case '/': text += *at_; break;
                case 'u':
                    if (!unicode(text)) {
                        return false;
                    }
                    break;
                default: return false;
            }
        }
        return at_ != end_ && *at_++ == '"';
    }

    // \uXXXX as UTF-8; no pairs, which paths and words do without.
    bool unicode(std::string &text) {
        if (end_ - at_ < 5) {
            return false;
        }
        const std::string digits(at_ + 1, 4);
        char *stop = nullptr;
        const unsigned long code = std::strtoul(digits.c_str(), &stop, 16);
        if (*stop != '\0' || (code & 0xf800) == 0xd800) {
            return false;
        }
        at_ += 4;
        if (code < 0x80) {
            text += static_cast<char>(code);
            return true;
        }
        if (code < 0x800) {
            text += static_cast<char>(0xc0 | code >> 6);
        } else {
            text += static_cast<char>(0xe0 | code >> 12);
            text += static_cast<char>(0x80 | (code >> 6 & 0x3f));
        }
        text += static_cast<char>(0x80 | (code & 0x3f));
        return true;
    }

    bool number(Json &value) {
        const char *start = at_;
        while (at_ != end_ && (std::isdigit(static_cast<unsigned char>(*at_)) != 0 || *at_ == '-' || *at_ == '+' || *at_ == '.' ||
                               *at_ == 'e' || *at_ == 'E')) {
            ++at_;
        }
        const std::string digits(start, at_);
        const size_t lead = digits[0] == '-' ? 1 : 0;
        if (digits.size() == lead || std::isdigit(static_cast<unsigned char>(digits[lead])) == 0 ||
            (digits.size() > lead + 1 && digits[lead] == '0' && std::isdigit(static_cast<unsigned char>(digits[lead + 1])) != 0)) {
            return false;
        }
        char *stop = nullptr;
        if (digits.find_first_of(".eE") != std::string::npos) {
            value.kind = Json::Kind::real;
            value.real = std::strtod(digits.c_str(), &stop);
        } else {
            value.kind = Json::Kind::integer;
            value.integer = std::strtoll(digits.c_str(), &stop, 10);
        }
        return *stop == '\0';
    }

    const char *at_;
    const char *end_;
};

}  // namespace

bool Json::parse(const std::string &text, Json &value) {
    value = Json();
    return Parser(text).whole(value);
}

const Json *Json::find(const std::string &key) const {
    const auto found = object.find(key);
    return kind != Kind::object || found == object.end() ? nullptr : &found->second;
}

bool is_utf8(const std::string &text) {
    const auto byte = [&text](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
    const auto follows = [&byte](size_t i, unsigned low = 0x80, unsigned high = 0xBF) { return byte(i) >= low && byte(i) <= high; };
    for (size_t i = 0; i < text.size();) {
        const unsigned lead = byte(i);
        if (lead < 0x80) {
            i += 1;
        } else if (lead >= 0xC2 && lead <= 0xDF && follows(i + 1)) {
            i += 2;
        } else if (lead >= 0xE0 && lead <= 0xEF && follows(i + 1, lead == 0xE0 ? 0xA0 : 0x80, lead == 0xED ? 0x9F : 0xBF) && follows(i + 2)) {
            i += 3;
        } else if (lead >= 0xF0 && lead <= 0xF4 && follows(i + 1, lead == 0xF0 ? 0x90 : 0x80, lead == 0xF4 ? 0x8F : 0xBF) && follows(i + 2) &&
                   follows(i + 3)) {
            i += 4;
        } else {
            return false;
        }
    }
    return true;
}

}  // namespace sim
