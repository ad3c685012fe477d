// The requests that HIXL has, by tokens that it carries along as user_data: it recycles its own handles.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "abi.hpp"
#include "hxa_driver.h"
#include "sync.hpp"

namespace hx {

class RequestQueue;

struct Request {
    void *handle = nullptr;  // HIXL's handle
    hxa_op *op = nullptr;
    RequestQueue *queue = nullptr;
    Request *next = nullptr, *prev = nullptr;  // of the queue, oldest first
    Request *answered = nullptr;               // the next on the queue's stack of answers
    uint64_t token = 0;                        // under the table's lock; 0: free
    uint64_t bytes = 0;
    abi::TransferStatus answer = abi::WAITING;
    int32_t slot = -1;   // of the scratch page
    uint32_t index = 0;  // in the table
};

// All requests of an instance.
class RequestTable {
  public:
    Request *begin(RequestQueue *queue);
    void end(Request *request);
    // Under `lock`: return the request of a token, or nullptr if it ended.
    Request *find(uint64_t token);
    Mutex lock;
    std::atomic<uint32_t> count{0};

  private:
    std::deque<Request> all_;
    std::vector<Request *> free_;
    uint64_t generation_ = 0;
};

}  // namespace hx
