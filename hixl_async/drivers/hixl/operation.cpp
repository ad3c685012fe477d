#include "operation.hpp"

#include "link.hpp"
#include "notes.hpp"

namespace hx {

// ---- lists ----------------------------------------------------------------------------------------------------------

void OpList::push(hxa_op *op) {
    operation_of(op).next = nullptr;
    if (last != nullptr) operation_of(last).next = op;
    else first = op;
    last = op;
}

void OpList::push_front(hxa_op *op) {
    operation_of(op).next = first;
    first = op;
    if (last == nullptr) last = op;
}

hxa_op *OpList::pop() {
    hxa_op *op = first;
    first = operation_of(op).next;
    if (first == nullptr) last = nullptr;
    return op;
}

bool OpList::remove(hxa_op *op) {
    hxa_op *before = nullptr;
    for (hxa_op *at = first; at != nullptr; before = at, at = operation_of(at).next) {
        if (at != op) continue;
        if (before != nullptr) operation_of(before).next = operation_of(op).next;
        else first = operation_of(op).next;
        if (last == op) last = before;
        return true;
    }
    return false;
}

// ---- outcomes -------------------------------------------------------------------------------------------------------

uint32_t note_cost(const hxa_batch &batch) {
    return record_cost(BODY_HEAD + static_cast<size_t>(batch.topic_len) + batch.note_len);
}

void set_outcome(hxa_op *op, const Outcome &outcome) {
    if (op->status != HXA_OK) return;
    op->status = outcome.status;
    op->native = outcome.native;
    op->scope = outcome.scope;
}

void finish(const hxa_sink &sink, hxa_op *op, const Outcome &outcome) {
    op->status = outcome.status;
    op->native = outcome.native;
    op->scope = outcome.scope;
    hxa_finish(&sink, op);
}

void finish_operation(const hxa_sink &sink, hxa_op *op, const Outcome &outcome) {
    Operation &operation = operation_of(op);
    if (!outcome.ok()) set_outcome(op, outcome);
    // A failure before the notification was sent gives its room back.
    if (op->status != HXA_OK && operation.batch->topic != nullptr)
        operation.link->out.unreserve(note_cost(*operation.batch));
    if ((operation.stage & REPORTED) != 0) return hxa_release(&sink, op);
    op->bytes = operation.landed.load(std::memory_order_relaxed);
    hxa_finish(&sink, op);
}

}  // namespace hx
