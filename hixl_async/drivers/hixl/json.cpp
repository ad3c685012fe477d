#include "json.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace hx {

const Json *Json::field(const std::string &name) const {
    for (const auto &entry : fields)
        if (entry.first == name) return &entry.second;
    return nullptr;
}

bool Json::number(double &out) const {
    if (kind != NUMBER && kind != STRING) return false;
    if (text.empty()) return false;
    char *end = nullptr;
    out = std::strtod(text.c_str(), &end);
    return *end == '\0';
}

namespace {

class Parser {
  public:
    explicit Parser(const std::string &text) : at_(text.c_str()), end_(at_ + text.size()) {}

    bool document(Json &out, std::string &error) {
        bool fine = value(out, 0);
        space();
        if (fine && at_ != end_) fine = fail("something follows it");
        if (!fine) error = problem_;
        return fine;
    }

  private:
    const char *at_, *end_;
    std::string problem_;

    bool fail(const char *what) {
        if (problem_.empty()) problem_ = what;
        return false;
    }
    void space() {
        while (at_ != end_ && std::strchr(" \t\r\n", *at_) != nullptr && *at_ != '\0') at_++;
    }
    bool take(char c) {
        space();
        if (at_ == end_ || *at_ != c) return false;
        at_++;
        return true;
    }
    bool word(const char *text) {
        const size_t n = std::strlen(text);
        if (static_cast<size_t>(end_ - at_) < n || std::strncmp(at_, text, n) != 0) return fail("an unknown word");
        at_ += n;
        return true;
    }
    bool unit(uint32_t &out) {
        out = 0;
        for (int i = 0; i < 4; i++, at_++) {
            const char *digits = "0123456789abcdefABCDEF";
            const char *found = at_ != end_ && *at_ != '\0' ? std::strchr(digits, *at_) : nullptr;
            if (found == nullptr) return false;
            const uint32_t value = static_cast<uint32_t>(found - digits);
            out = out << 4 | (value < 16 ? value : value - 6);
        }
        return true;
    }
    // Append the character of the digits after \u, as UTF-8.
    bool unicode(std::string &out) {
        uint32_t code, low;
        if (!unit(code) || (code >= 0xdc00 && code < 0xe000)) return false;
        if (code >= 0xd800 && code < 0xdc00) {
            if (end_ - at_ < 6 || *at_++ != '\\' || *at_++ != 'u' || !unit(low) || low < 0xdc00 || low >= 0xe000)
                return false;
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        const uint32_t lead[] = {0, 0xc0, 0xe0, 0xf0};
        out += static_cast<char>(lead[more] | code >> 6 * more);
        for (int i = more; i-- > 0;) out += static_cast<char>(0x80 | (code >> 6 * i & 0x3f));
        return true;
    }
    bool string(std::string &out) {
        if (!take('"')) return fail("a string is missing");
        while (at_ != end_ && *at_ != '"') {
            if (*at_ == '\\') {
                if (++at_ == end_) break;
                if (*at_ == 'u') {
                    at_++;
                    if (!unicode(out)) return fail("\\u wants four hexadecimal digits, and surrogates are two");
                    continue;
                }
                const char *from = "\"\\/bfnrt", *to = "\"\\/\b\f\n\r\t";
                const char *found = std::strchr(from, *at_);
                if (*at_ == '\0' || found == nullptr) return fail("an unknown escape");
                out += to[found - from];
                at_++;
            } else {
                out += *at_++;
            }
        }
        if (at_ == end_) return fail("a string does not end");
        at_++;
        return true;
    }
    bool value(Json &out, int depth) {
        if (depth > 16) return fail("it is nested too deeply");
        space();
        if (at_ == end_) return fail("it ends too early");
        if (*at_ == '"') {
            out.kind = Json::STRING;
            return string(out.text);
        }
        if (*at_ == 't' || *at_ == 'f') {
            out.kind = Json::BOOLEAN;
            out.truth = *at_ == 't';
            return word(out.truth ? "true" : "false");
        }
        if (*at_ == 'n') return word("null");
        if (*at_ == '[') {
            out.kind = Json::LIST;
            at_++;
            if (take(']')) return true;
            do {
                out.items.emplace_back();
                if (!value(out.items.back(), depth + 1)) return false;
            } while (take(','));
            return take(']') || fail("a ] is missing");
        }
        if (*at_ == '{') {
            out.kind = Json::OBJECT;
            at_++;
            if (take('}')) return true;
            do {
                out.fields.emplace_back();
                if (!string(out.fields.back().first)) return false;
                if (!take(':')) return fail("a : is missing");
                if (!value(out.fields.back().second, depth + 1)) return false;
            } while (take(','));
            return take('}') || fail("a } is missing");
        }
        const char *start = at_;
        while (at_ != end_ && std::strchr("+-.0123456789eE", *at_) != nullptr && *at_ != '\0') at_++;
        if (at_ == start) return fail("an unexpected character");
        out.kind = Json::NUMBER;
        out.text.assign(start, at_);
        double ignored;
        return out.number(ignored) || fail("a malformed number");
    }
};

}  // namespace

bool Json::parse(const std::string &text, Json &out, std::string &error) { return Parser(text).document(out, error); }

}  // namespace hx
