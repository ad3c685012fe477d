#include "request.hpp"

namespace hx {

namespace {
constexpr unsigned INDEX_BITS = 24;
}

Request *RequestTable::begin(RequestQueue *queue) {
    Guard guard(lock);
    if (free_.empty()) {
        all_.emplace_back();
        all_.back().index = static_cast<uint32_t>(all_.size() - 1);
        free_.push_back(&all_.back());
    }
    Request *request = free_.back();
    free_.pop_back();
    const uint32_t index = request->index;
    *request = Request();
    request->index = index;
    request->queue = queue;
    request->token = ++generation_ << INDEX_BITS | index;
    count.fetch_add(1, std::memory_order_relaxed);
    return request;
}

void RequestTable::end(Request *request) {
    Guard guard(lock);
    request->token = 0;
    free_.push_back(request);
    count.fetch_sub(1, std::memory_order_relaxed);
}

Request *RequestTable::find(uint64_t token) {
    const uint64_t index = token & ((1u << INDEX_BITS) - 1);
    if (token == 0 || index >= all_.size()) return nullptr;
    Request *request = &all_[index];
    return request->token == token ? request : nullptr;
}

}  // namespace hx
