#include "doorbell.hpp"

#include <unistd.h>

#include "hxa_retry.h"
#include "link.hpp"

namespace hx {

void ring_doorbell(hxa_link *link) {
    if (link->armed.exchange(0) == 0) return;
    const uint64_t one = 1;
    const ssize_t written = HXA_RETRY(write(link->fd, &one, sizeof one));
    (void)written;
    link->self->count.wakes_sent++;
}

bool clear_doorbell(hxa_link *link) {
    uint64_t rings;
    return HXA_RETRY(read(link->fd, &rings, sizeof rings)) == sizeof rings;
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
