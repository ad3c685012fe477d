// Notification I/O: sending the notifications of an endpoint's links, and fetching those that came for the engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "instance.hpp"
#include "link.hpp"
#include "notes.hpp"

namespace hx {

// The sender of all links to one remote engine; it runs on the endpoint's control strand, because SendNotify blocks.
class NotificationSender {
  public:
    NotificationSender(hxa_instance &self, const std::string &id, const abi::Text &remote);
    void run_on(std::shared_ptr<Strand> control) { control_ = std::move(control); }

    // Any thread.
    void wake() { control_->wake(); }  // there may be notifications to send
    void resend(hxa_link *link, uint64_t seq);
    void set_connected(bool connected) { connected_ = connected; }

    // The control strand.  deliver returns when to call it again.
    uint64_t deliver(uint64_t now);
    void add(hxa_link *link) { links_.push_back(link); }
    void remove(hxa_link *link);  // after its last messages
    void drop(hxa_link *link, const Outcome &outcome);
    // Drop the notification of an op; return true if it waited.  With `abandoned`, only if the op is.
    bool take_back(hxa_op *op, bool abandoned);
    // The connection is a new one, and ended.
    void renew();
    void resend_unfetched();

  private:
    void deliver(hxa_link *link, uint64_t now, uint64_t &next);
    bool by_hixl(hxa_link *link, std::vector<Entry> &entries, uint64_t now);
    void by_control(hxa_link *link, const std::vector<Entry> &entries);
    void use_control(hxa_link *link, const std::string &why);

    hxa_instance &self_;
    const std::string id_;
    const abi::Text remote_;
    std::shared_ptr<Strand> control_;
    std::atomic<bool> connected_{false};  // notifications may go by HIXL
    std::vector<hxa_link *> links_;
};

// The notifications strand's work: take what HIXL has received.
uint64_t fetch_notifications(hxa_instance &self, uint64_t now);

}  // namespace hx
