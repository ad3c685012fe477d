// One peer's use of an endpoint, as the core sees it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "instance.hpp"
#include "notes.hpp"

struct hxa_link {
    enum State : uint32_t { NEW, UP, STOPPED };
    hxa_instance *self = nullptr;
    uint64_t cookie = 0;
    uint64_t tag = 0, peer_tag = 0, peer_token = 0;
    uint32_t window = 0, peer_window = 0;
    bool peer_control = false;               // the peer sends by the control connection
    std::shared_ptr<hx::Endpoint> endpoint;  // from link_connect on

    std::atomic<uint32_t> state{NEW};
    std::atomic<uint32_t> fenced{0};  // the peer wants us to stay away
    std::atomic<uint32_t> down{0};    // LINK_DOWN was reported, or is about to

    hx::Outbox out;
    hx::Inbox in;
    int fd = -1;  // the doorbell, an eventfd: poll has work
    std::atomic<uint32_t> armed{1};

    // The end, as poll shall report it.
    hx::Mutex lock;
    bool end_pending = false;
    uint64_t end_after = 0;  // once all notifications up to this are handed out
    std::string end_text;

    // The loop's.
    hxa_op *fence = nullptr;
    bool peer_away = false;  // it sent FENCED or STOPPED, or is dead

    // The endpoint's strand's.
    bool attached = false, stopping = false, leaving = false, fencing = false;
    bool lost = false;              // given up
    std::atomic<bool> dead{false};  // the caller's word
    hxa_op *connecting = nullptr;   // link_connect
    std::vector<hxa_op *> stops;
    uint64_t patience = hx::NEVER;  // a stop or fence waits this long for requests before the link is cut

    // The control strand's.
    bool by_control = false;   // sends by the control connection
    bool logged_long = false;  // that long notifications do
    uint32_t losses = 0, breaks = 0;
    uint64_t sent_at = 0;
    uint64_t retry_at = 0, retry_ns = 0;
    std::vector<hx::Entry> held;  // numbered, and refused for lack of room
};

namespace hx {

constexpr uint64_t DESCRIPTORS = 1 << 16;  // most in one batch

int link_new(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_metadata *metadata);
int link_connect(hxa_link *link, const hxa_metadata *metadata, hxa_op *op);
int link_fd(hxa_link *link);
int link_stop(hxa_link *link, int dead, hxa_op *op);
int link_fence(hxa_link *link, hxa_op *op);
void link_free(hxa_link *link);
int link_poll(hxa_link *link, uint32_t budget);
int link_message(hxa_link *link, const void *data, size_t len);

int submit(hxa_link *link, const hxa_batch *batch, hxa_op *op);
int cancel(hxa_link *link, hxa_op *op);
uint64_t progress(hxa_link *link, const hxa_op *op);
int abandon(hxa_link *link, hxa_op *op);

}  // namespace hx
