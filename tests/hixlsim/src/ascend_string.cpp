// libmetadef.so: the one class of it that HIXL's interface uses.
#include <cstring>

#include "api.hpp"

namespace ge {

AscendString::AscendString(const char *text) {
    if (text != nullptr) {
        text_ = std::make_shared<std::string>(text);
    }
}

AscendString::AscendString(const char *text, size_t length) {
    if (text != nullptr) {
        text_ = std::make_shared<std::string>(text, length);
    }
}

const char *AscendString::GetString() const { return text_ == nullptr ? "" : text_->c_str(); }

size_t AscendString::GetLength() const { return text_ == nullptr ? 0 : text_->length(); }

size_t AscendString::Find(const AscendString &other) const {
    return text_ == nullptr || other.text_ == nullptr ? std::string::npos : text_->find(*other.text_);
}

size_t AscendString::Hash() const { return std::hash<std::string>()(text_ == nullptr ? std::string() : *text_); }

static int compare(const AscendString &a, const AscendString &b) {
    const size_t shorter = a.GetLength() < b.GetLength() ? a.GetLength() : b.GetLength();
    const int order = std::memcmp(a.GetString(), b.GetString(), shorter);
    return order != 0 ? order : static_cast<int>(a.GetLength() > b.GetLength()) - static_cast<int>(a.GetLength() < b.GetLength());
}

bool AscendString::operator<(const AscendString &other) const { return compare(*this, other) < 0; }
bool AscendString::operator>(const AscendString &other) const { return compare(*this, other) > 0; }
bool AscendString::operator<=(const AscendString &other) const { return compare(*this, other) <= 0; }
bool AscendString::operator>=(const AscendString &other) const { return compare(*this, other) >= 0; }
bool AscendString::operator==(const AscendString &other) const { return compare(*this, other) == 0; }
bool AscendString::operator!=(const AscendString &other) const { return compare(*this, other) != 0; }

}  // namespace ge
