#include "receive.h"

#include "doorbell.h"
#include "fence.h"
#include "notes.h"
#include "ring.h"

int shm_link_fd(hxa_link *link) { return link->peer_bell; }

/* Signals before the notifications that follow them (T5): head is read first. */
static int receive(hxa_link *link, uint32_t budget) {
    shm_half *own = link->own;
    hxa_instance *self = link->self;
    const uint64_t head = shm_load_sc(&own->head), before = link->tail;
    const uint64_t signals = shm_load_sc(&own->signals);
    hxa_event event = {.link = link->cookie, .kind = HXA_EVENT_SIGNAL};
    int answer = SHM_RING_EMPTY;
    if (signals != link->signals_seen && budget != 0) {
        link->signals_seen = signals;
        self->sink.event(self->sink.ctx, &event);
        budget--;
    }
    event.kind = HXA_EVENT_NOTE;
    for (; budget != 0; budget--) {
        answer = shm_ring_get(own, link->capacity, &link->tail, head, self->note_bytes, self->text, &event.topic_len,
                              &event.data_len);
        if (answer != SHM_RING_OK) break;
        event.topic = self->text;
        event.data = self->text + event.topic_len;
        shm_bump(&self->loop.notes_received, 1);
        self->sink.event(self->sink.ctx, &event);
    }
    if (link->tail != before) {
        shm_store_sc(&own->tail, link->tail);
        /* Dekker with the pump of the peer: it says that it wants room, then looks at tail. */
        if (shm_load_sc(&own->want_space) != 0 && shm_swap_sc(&own->want_space, 0u) != 0) shm_bell_wake(link);
    }
    if (answer == SHM_RING_CORRUPT) shm_link_break(link, HXA_E_PROTOCOL, "the peer wrote a malformed record into the notification ring");
    return answer == SHM_RING_OK || budget == 0;
}

/* Return 1 if a poll would find anything to do; called after arming. */
static int waiting(hxa_link *link) {
    shm_half *own = link->own;
    if (shm_fence_waits(link)) return 1;
    if (shm_load(&link->down) == 0 && (link->bell_end != 0 || shm_load_sc(&own->gone) != 0)) return 1;
    if (shm_load(&link->state) != SHM_UP) return 0;
    if (shm_load_sc(&own->head) != link->tail || shm_load_sc(&own->signals) != link->signals_seen) return 1;
    return shm_notes_ready(link);
}

int shm_poll(hxa_link *link, uint32_t budget) {
    if (link->peer == NULL) return 0;
    shm_half *own = link->own;
    shm_store_sc(&own->armed, 0u);     /* awake: no need to ring */
    if (!link->more && link->bell_end == 0) {
        const ssize_t rings = shm_bell_clear(link->peer_bell, link->self->nowait);
        if (rings > 0) shm_bump(&link->self->loop.wakes_received, (uint64_t)rings);
        else link->bell_end = (int8_t)rings;
    }
    /* Read before the ring, so that what the peer sent before it left is delivered before the news that it left. */
    const uint32_t gone = shm_load_sc(&own->gone);
    shm_fence_poll(link);
    int more = 0;
    if (shm_load(&link->state) == SHM_UP) more = receive(link, budget);
    if (link->bell_end == SHM_BELL_FAULTY) shm_link_break(link, HXA_E_PROTOCOL, "the peer's doorbell cannot be read any more");
    else if (!more && link->bell_end != 0) shm_link_break(link, HXA_E_LINK, "the peer's end of the link is closed");
    else if (!more && gone) shm_link_break(link, HXA_E_LINK, "the peer stopped the link");
    if (shm_load_sc(&link->waiting_n) != 0) shm_notes_pump(link);
    if (!more) {
        shm_store_sc(&own->armed, 1u);
        more = waiting(link);
        if (more) shm_store_sc(&own->armed, 0u);
    }
    link->more = (uint8_t)more;
    return more;
}
