#include "doorbell.hpp"

#include <unistd.h>

#include "link.hpp"

namespace hx {

void ring_doorbell(hxa_link *link) {
    if (link->armed.exchange(0) == 0) return;
    const uint64_t one = 1;
    retried([&] { return write(link->fd, &one, sizeof one); });
    link->self->count.wakes_sent++;
}

bool clear_doorbell(hxa_link *link) {
    uint64_t rings;
    return retried([&] { return read(link->fd, &rings, sizeof rings); }) == sizeof rings;
}

void end_link(hxa_link *link, uint64_t after, const std::string &why) {
    {
        Guard guard(link->lock);
        if (link->end_pending) return;
        link->end_pending = true;
        link->end_after = after;
        link->end_text = why;
    }
    ring_doorbell(link);
}

}  // namespace hx
