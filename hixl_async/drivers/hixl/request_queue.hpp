// The requests of one endpoint: cut from ops, given to HIXL, asked about until each has its one answer.
#pragma once

#include <atomic>
#include <vector>

#include "instance.hpp"
#include "notification_io.hpp"
#include "operation.hpp"
#include "request.hpp"

namespace hx {

class RequestQueue {
  public:
    // `strand` runs everything here but `submit` and `answer`; `notifications` sends what follows the data.
    RequestQueue(hxa_instance &self, const abi::Text &remote, Strand &strand, NotificationSender &notifications);

    // Any thread.
    void submit(hxa_op *op);
    void answer(Request *request);  // under the table's lock

    // One turn of the strand.
    void begin_turn(uint64_t now) { now_ = now; }
    void take_submitted();
    bool launch();  // give HIXL the requests that may go now; return true if more could go at once
    void poll();    // ask about the requests in flight
    void take_answers();
    // Return when to poll or launch again.
    uint64_t next_turn(uint64_t now) const;

    uint32_t in_flight() const { return in_flight_; }
    uint32_t in_flight_of(const hxa_link *link) const;
    bool waiting() const { return !waiting_.empty(); }
    bool idle() const { return in_flight_ == 0 && waiting_.empty(); }
    bool moved(uint64_t now) const { return moved_ == now; }

    // The connection: it sees the memory that was registered before it was made, by numbers.
    void connected(uint64_t local, uint64_t remote);
    void disconnected() { connected_ = needs_connection_ = false; }
    void remote_changed() { visible_remote_ = 0; }
    // Memory that came later wants a new connection, once nothing is in flight.
    bool needs_connection() const { return needs_connection_; }
    // Return true, and the reason, if a request failed, so that the connection is to be cut.
    bool take_failure(Outcome &why);
    // The connection is being cut: everything in flight fails, and is released by `release_all` once that is over.
    void fail_all(const Outcome &outcome);
    void release_all(const Outcome &outcome);

    // Fail the ops of a link that have not begun.
    void fail_waiting(const hxa_link *link, const Outcome &outcome);
    // Take back an op that was cancelled; return true if it waited here.
    bool take_back(hxa_op *op);
    enum class Found { NO, WAITING, IN_FLIGHT };
    Found abandon(hxa_op *op);

  private:
    enum class Verdict { SENT, LATER, OVER };
    enum class Fit { FINE, NEEDS_CONNECTION, PARK, REFUSED };

    void unpark();
    Fit fits(const hxa_batch &batch, Outcome &refusal) const;
    bool claim(hxa_op *op);
    bool admit(hxa_op *op);
    Verdict send(hxa_op *op);
    Verdict refused(hxa_op *op, uint32_t native, uint64_t cursor);
    bool build(hxa_op *op, Request &request);
    bool build_signal(hxa_op *op, Request &request);
    bool poll_batch();
    void poll_each(bool all);
    void take_seen();
    void finished(Request *request, uint32_t native, abi::TransferStatus status);
    void end_request(Request *request);
    void free_slot(Request *request);
    void advance(hxa_op *op);
    void fail(hxa_op *op, const Outcome &outcome);
    void report_failure(hxa_op *op);
    void connection_failed(const Outcome &outcome);
    uint64_t rest(uint64_t now) const;

    hxa_instance &self_;
    const abi::Text &remote_;
    Strand &strand_;
    NotificationSender &notifications_;
    const bool auto_connect_;  // HIXL drops requests by itself
    std::atomic<hxa_op *> submitted_{nullptr};
    std::atomic<Request *> answers_{nullptr};

    // The strand's.
    OpList waiting_;  // to be sent, in order
    OpList parked_;   // to be sent once their memory is registered; and cancelled ones until they are taken back
    Request *first_ = nullptr, *last_ = nullptr, *probe_ = nullptr;
    uint32_t in_flight_ = 0;
    bool connected_ = false;  // and not being cut
    bool needs_connection_ = false;
    bool failed_ = false;
    Outcome failure_;
    uint64_t now_ = 0;  // of this turn
    uint64_t visible_local_ = 0, visible_remote_ = 0;
    uint64_t moved_ = 0;  // last progress
    uint64_t retry_at_ = 0, busy_since_ = 0, busy_ns_ = 0, batch_polled_ = 0;
    uint32_t bounces_ = 0;
    std::vector<abi::TransferOpDesc> descs_;
    std::vector<abi::TransferResult> results_;
    struct Answer {
        Request *request;
        uint64_t token;
        uint32_t native;
        abi::TransferStatus status;
    };
    std::vector<Answer> seen_;
};

}  // namespace hx
