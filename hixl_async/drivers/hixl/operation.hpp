// One accepted op of the core, and what the driver knows of it.
#pragma once

#include <atomic>
#include <cstdint>

#include "hxa_driver.h"
#include "status.hpp"

namespace hx {

enum Claim : uint32_t { QUEUED = 0, STARTED = 1, CANCELLED = 2, CLAIM = 3, ABANDONED = 4 };
enum Stage : uint8_t { DATA = 0, SIGNAL = 1, NOTE = 2, STAGE = 3, REPORTED = 128 };

// In the op's scratch words.
struct Operation {
    hxa_op *next;  // in one list at a time
    hxa_link *link;
    const hxa_batch *batch;
    std::atomic<uint64_t> landed;  // bytes
    uint64_t cursor;               // the next descriptor: group of kinds << 32 | index
    std::atomic<uint32_t> claim;   // QUEUED until the first byte may move, or it is CANCELLED; and ABANDONED
    uint16_t parts;                // requests in flight
    uint8_t groups;                // bit (local kind * 2 + remote kind): there are such descriptors
    uint8_t stage;
};
static_assert(sizeof(Operation) <= sizeof(hxa_op::scratch), "an operation fits into the scratch words");

inline Operation &operation_of(hxa_op *op) { return *reinterpret_cast<Operation *>(op->scratch); }
inline const Operation &operation_of(const hxa_op *op) { return *reinterpret_cast<const Operation *>(op->scratch); }
constexpr uint64_t CURSOR_END = UINT64_MAX;

// First in, first out, through Operation::next.
struct OpList {
    hxa_op *first = nullptr, *last = nullptr;
    bool empty() const { return first == nullptr; }
    void push(hxa_op *op);
    void push_front(hxa_op *op);
    hxa_op *pop();
    bool remove(hxa_op *op);
};

// The room that a notification takes at the receiver.
uint32_t note_cost(const hxa_batch &batch);

// Finish an op that has no Operation: a call about links or memory.
void finish(const hxa_sink &sink, hxa_op *op, const Outcome &outcome);
// Set the outcome, unless an earlier failure did.
void set_outcome(hxa_op *op, const Outcome &outcome);
// Finish an operation, on whichever strand has it.
void finish_operation(const hxa_sink &sink, hxa_op *op, const Outcome &outcome);

}  // namespace hx
