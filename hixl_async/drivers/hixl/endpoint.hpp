// The use of one remote engine by all links to it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "connection.hpp"
#include "instance.hpp"
#include "link.hpp"
#include "notification_io.hpp"
#include "request_queue.hpp"

namespace hx {

// HIXL has one connection for each remote address, and a failure fails everything that is in flight on it.
class Endpoint : public Strand {
  public:
    Endpoint(hxa_instance &self, std::string id);
    void open();  // make the control strand; needs shared_from_this

    const std::string id;
    // Any thread.
    void submit(hxa_op *op) { requests_.submit(op); }
    void wake_sender() { sender_.wake(); }
    void resend(hxa_link *link, uint64_t seq) { sender_.resend(link, seq); }
    void attach(hxa_link *link, uint64_t registrations, hxa_op *op);
    void stop(hxa_link *link, bool dead, hxa_op *op);
    void fence(hxa_link *link);
    void cancel(hxa_op *op);  // its claim is CANCELLED
    void abandon(hxa_op *op);
    void has_registered(uint64_t number);  // the remote engine, so many memories
    bool idle() const { return idle_.load() != 0; }

  protected:
    uint64_t turn(uint64_t now) override;
    // An op that is stopped, cancelled or abandoned right after its submission has to be found in the queue.
    void arrive() override { requests_.take_submitted(); }
    void stuck(const char *call, uint64_t ns) override { report(call, ns, false); }
    void moving(const char *call, uint64_t ns) override { report(call, ns, true); }

  private:
    enum class Phase { DOWN, CONNECTING, UP, DISCONNECTING };

    // The connection.
    void drive(uint64_t now, uint64_t &next);
    void finish_connecting();
    void leave_instance();
    bool wanted() const;
    void connect();
    void connected(uint32_t native, uint64_t local, uint64_t remote);
    void refused(uint32_t native);
    void disconnect();
    void disconnected();
    void cut(const Outcome &outcome);  // fail everything in flight, then connect again
    void cut_if_failed();
    void give_up(const Outcome &outcome);
    void report(const char *call, uint64_t ns, bool over);

    // Links that leave.
    void release_link(hxa_link *link, const Outcome &outcome);
    void settle_links(uint64_t now, uint64_t &next);
    void detach(hxa_link *link);
    bool shared(const hxa_link *link) const;

    hxa_instance &self_;
    const abi::Text remote_;
    std::shared_ptr<FunctionStrand> control_;
    std::atomic<uint32_t> idle_{1};
    std::atomic<uint32_t> attaching_{0};  // links on their way to the strand
    std::atomic<uint64_t> known_{0};      // memories that the remote engine has registered, as far as it has told
    Connection connection_;               // the control strand's
    NotificationSender sender_;           // the control strand's

    // The strand's.
    RequestQueue requests_;
    Phase phase_ = Phase::DOWN;
    std::vector<hxa_link *> links_;
    uint64_t peer_token_ = 0;
    bool cutting_ = false;  // everything in flight is released once Disconnect has returned
    bool ended_ = false;    // not in the instance's table any more
    uint64_t connect_at_ = 0;
    uint32_t refusals_ = 0;
};

}  // namespace hx
