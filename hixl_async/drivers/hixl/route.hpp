#pragma once

#include "hixl.hpp"
#include "sockets.hpp"

namespace hx {

// The way to one remote engine; several links may use it.  HIXL knows one connection per remote address, and what
// fails, fails for all that is in flight on it.
class Route : public Strand {
  public:
    Route(hxa_instance &self, std::string id);
    void open();  // makes the control strand; needs shared_from_this

    const std::string id;
    // Any thread.
    void submit(hxa_op *op);
    void pump();  // there may be notifications to send
    void attach(hxa_link *link, uint64_t registrations, hxa_op *op);
    void stop(hxa_link *link, bool dead, hxa_op *op);
    void fence(hxa_link *link);
    void reap(hxa_op *op);  // it was cancelled
    void abandon(hxa_op *op);
    void resend(hxa_link *link, uint64_t seq);
    void know(uint64_t number);   // the remote engine has registered so many memories
    void answer(Flight *flight);  // under the ledger's lock
    bool idle() const { return idle_.load() != 0; }
    void finish(hxa_op *op, const Outcome &outcome);

  protected:
    uint64_t turn(uint64_t now) override;
    // An op that is stopped, cancelled or abandoned right after its submission has to be found in our lists.
    void arrive() override { take_inbox(); }
    void stuck(const char *call, uint64_t ns) override;
    void moving(const char *call, uint64_t ns) override;

  private:
    enum class Phase { DOWN, JOINING, UP, PARTING };
    enum class Verdict { SENT, LATER, OVER };

    // route.cpp: the connection.
    void drive(uint64_t now, uint64_t &next);
    void join();
    void joined(uint32_t native, uint64_t local, uint64_t remote);
    void part();
    void parted();
    void cut(const Outcome &outcome);  // a hard cycle: what is in flight fails, then connect again
    void hurry(uint64_t now, uint64_t &next);
    void report(const char *call, uint64_t ns, bool over);
    void give_up(const Outcome &outcome);
    bool wanted() const;
    uint32_t connect_call();
    void disconnect_call();
    bool by_async() const { return self_.options.connect_async && self_.library.connect_async != nullptr; }
    uint32_t connect_async(int32_t timeout_ms);
    void disconnect_async(int32_t timeout_ms);
    void let_go(hxa_link *link, const Outcome &outcome);
    void left(hxa_link *link);
    void settle_links(uint64_t now, uint64_t &next);
    bool shared(const hxa_link *link) const;
    void fail_waiting(hxa_link *link, const Outcome &outcome);

    // flight.cpp: requests.
    void take_inbox();
    bool launch();
    void unpark();
    enum class Fit { FINE, CYCLE, PARK, REFUSED };
    Fit fits(const hxa_batch &batch, Outcome &refusal) const;
    Verdict send(hxa_op *op);
    bool build(hxa_op *op, Flight &flight);
    void look();
    bool sweep();
    void ask();
    void take_answers();
    void landed(Flight *flight, uint32_t native, abi::TransferStatus status);
    void end_flight(Flight *flight);
    void advance(hxa_op *op);
    void fail(hxa_op *op, const Outcome &outcome);
    void broken(const Outcome &outcome);
    void tell(hxa_op *op);
    uint32_t flights_of(const hxa_link *link) const;
    uint64_t rest(uint64_t now) const;

    // courier.cpp: notifications, on the control strand.
    uint64_t deliver(uint64_t now);
    void deliver(hxa_link *link, uint64_t now, uint64_t &next);
    bool by_hixl(hxa_link *link, std::vector<Entry> &entries, uint64_t now);
    void by_control(hxa_link *link, const std::vector<Entry> &entries);
    void sent(hxa_link *link, const std::vector<Entry> &entries, const Outcome &outcome);
    void switch_over(hxa_link *link, const std::string &why);
    void drop_notes(hxa_link *link, const Outcome &outcome);
    void farewell(hxa_link *link);

    hxa_instance &self_;
    const abi::Text remote_;
    const bool auto_connect_;  // HIXL drops requests by itself
    std::shared_ptr<Calls> control_;
    std::atomic<hxa_op *> inbox_{nullptr};
    std::atomic<Flight *> answers_{nullptr};
    std::atomic<uint32_t> idle_{1};
    std::atomic<uint32_t> up_{0};         // notifications may go by HIXL
    std::atomic<uint32_t> attaching_{0};  // links on their way to the strand
    std::atomic<uint32_t> gone_{0};       // nobody is at the other end any more
    std::atomic<uint64_t> known_{0};      // memories of the remote engine that we have heard of
    Sockets sockets_;

    // The strand's.
    Phase phase_ = Phase::DOWN;
    std::vector<hxa_link *> links_;
    uint64_t peer_token_ = 0;
    OpList waiting_;  // to be sent, in order
    OpList parked_;   // to be sent once their memory is registered; and cancelled ones until they are reaped
    Flight *first_ = nullptr, *last_ = nullptr, *probe_ = nullptr;
    uint32_t flights_ = 0;
    bool cycle_ = false;   // disconnect and connect before the next request
    bool broken_ = false;  // to be cut in this turn, and why
    Outcome breakage_;
    bool cutting_ = false;  // everything in flight fails once Disconnect has returned
    bool ended_ = false;    // not in the engine's table any more
    uint64_t now_ = 0;      // of this turn
    uint64_t visible_local_ = 0, visible_remote_ = 0;
    uint64_t moved_ = 0;  // last progress
    uint64_t retry_at_ = 0, busy_since_ = 0, busy_ns_ = 0;
    uint64_t connect_at_ = 0, hurry_at_ = 0, swept_ = 0;
    uint32_t refusals_ = 0, bounces_ = 0;
    std::vector<abi::TransferOpDesc> descs_;
    std::vector<abi::TransferResult> results_;
    struct Answer {
        Flight *flight;
        uint64_t token;
        uint32_t native;
        abi::TransferStatus status;
    };
    std::vector<Answer> seen_;

    // The control strand's.
    std::vector<hxa_link *> senders_;
};

}  // namespace hx
