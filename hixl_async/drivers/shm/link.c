/* Links: two halves, each a segment made by one side and written by the other, and a doorbell in each direction. */
#include "shm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static hxa_link *link_alloc(hxa_instance *self, uint64_t cookie) {
    hxa_link *link = (hxa_link *)calloc(1, sizeof *link);
    if (link == NULL) return NULL;
    link->self = self;
    link->cookie = cookie;
    link->bell = link->bell_read = link->peer_bell = link->pidfd = -1;
    link->capacity = self->capacity;
    link->refs = 1;
    link->vm_errno = ESRCH;
    link->next = self->links;
    if (link->next != NULL) link->next->prev = link;
    self->links = link;
    shm_bump(&self->loop.links, 1);
    return link;
}

static uint64_t half_bytes(uint32_t capacity) { return shm_pages(SHM_PAGE + (uint64_t)capacity); }

static void close_fd(int fd) {
    if (fd >= 0) close(fd);
}

void shm_link_free(hxa_link *link) {
    hxa_instance *self = link->self;
    if (link->fence != NULL) {         /* it never came: the peer may still write */
        link->fence->status = HXA_E_LINK;
        link->fence->scope = HXA_SCOPE_LINK;
        hxa_finish(&self->sink, link->fence);
    }
    if (link->own != NULL) shm_segment_unmap_peer((uint8_t *)link->own, half_bytes(link->capacity));
    if (link->peer != NULL) shm_segment_unmap_peer((uint8_t *)link->peer, half_bytes(link->peer_capacity));
    close_fd(link->bell);
    close_fd(link->bell_read);
    close_fd(link->peer_bell);
    close_fd(link->pidfd);
    if (link->next != NULL) link->next->prev = link->prev;
    if (link->prev != NULL) link->prev->next = link->next;
    else self->links = link->next;
    shm_store(&self->loop.links, self->loop.links - 1);
    free(link);
}

int shm_link_new(hxa_instance *self, uint64_t cookie, hxa_link **made, hxa_card *card) {
    hxa_link *link = link_alloc(self, cookie);
    if (link == NULL) return -HXA_E_NOMEM;
    int segment = -1, passed = -1;
    uint8_t *base = NULL;
    int status = shm_bell_new(&link->bell, &link->bell_read);
    if (status == 0 && (passed = fcntl(link->bell_read, F_DUPFD_CLOEXEC, 0)) < 0) status = -HXA_E_NOMEM;
    if (status == 0) status = shm_segment_create("hixl_async:link", half_bytes(link->capacity), &segment);
    if (status == 0) status = shm_segment_map_peer(segment, half_bytes(link->capacity), 1, &base);
    if (status == 0) {
        link->own = (shm_half *)(void *)base;
        status = shm_segment_seal(segment, 0);
    }
    if (status != 0) {
        close_fd(segment);
        close_fd(passed);
        shm_link_free(link);
        return status;
    }
    link->own->magic = SHM_HALF_MAGIC;
    link->own->capacity = link->capacity;
    link->own->armed = 1;              /* the first word of the peer rings */
    const shm_link_card about = {
        .pid = (uint32_t)getpid(), .magic = SHM_LINK_MAGIC, .version = SHM_VERSION, .capacity = link->capacity,
        .token = self->token, .token_at = (uint64_t)(uintptr_t)&self->token};
    memset(card, 0, sizeof *card);
    card->len = sizeof about;
    memcpy(card->data, &about, sizeof about);
    card->nfds = 2;
    card->fds[0] = segment;
    card->fds[1] = passed;
    *made = link;
    return 0;
}

static int capacity_makes_sense(uint32_t capacity) {
    return capacity >= SHM_PAGE && capacity <= SHM_RING_MAX && (capacity & (capacity - 1)) == 0;
}

/* All checks, then everything that can fail, then the link is up. */
static int join(hxa_link *link, const hxa_card *card) {
    shm_link_card about;
    if (link->state != SHM_NEW) return -HXA_E_INVALID;
    if (card->len != sizeof about || card->nfds != 2) return -HXA_E_PROTOCOL;
    memcpy(&about, card->data, sizeof about);
    if (about.magic != SHM_LINK_MAGIC || about.version != SHM_VERSION) return -HXA_E_PROTOCOL;
    if (!capacity_makes_sense(about.capacity)) return -HXA_E_PROTOCOL;
    uint64_t actual;
    int status = shm_segment_check(card->fds[0], half_bytes(about.capacity), &actual);
    if (status != 0) return status;
    uint8_t *base;
    status = shm_segment_map_peer(card->fds[0], half_bytes(about.capacity), 1, &base);
    if (status != 0) return status == -HXA_E_RIGHTS ? -HXA_E_PROTOCOL : status;
    shm_half *peer = (shm_half *)(void *)base;
    int bell = card->fds[1];
    if (shm_load(&peer->magic) != SHM_HALF_MAGIC || shm_load(&peer->capacity) != about.capacity) status = -HXA_E_PROTOCOL;
    else status = shm_bell_adopt(&bell, link->self->nowait);
    if (status != 0) {
        shm_segment_unmap_peer(base, half_bytes(about.capacity));
        return status;
    }
    const uint64_t most = about.capacity / 4 - 16;
    link->note_bytes = most < link->self->note_bytes ? most : link->self->note_bytes;
    link->peer_capacity = about.capacity;
    link->peer_bell = bell;
    link->peer = peer;
    link->vm_errno = shm_vm_probe(link, &about);
    shm_store_rel(&link->state, (uint32_t)SHM_UP);
    return 0;
}

int shm_link_connect(hxa_link *link, const hxa_card *card, hxa_op *op) {
    (void)op;
    const int status = join(link, card);
    if (status != 0) {
        shm_close_card(card);
        return status;
    }
    shm_close_foreign(card->fds[0]);   /* the mapping keeps the segment; fds[1] is the link's now */
    return HXA_DONE;
}

int shm_link_fd(hxa_link *link) { return link->peer_bell; }

/* ---- waking ---------------------------------------------------------------------------------------------------------- */

/* After the peer was given something to see.  Dekker: we stored it, then look whether the peer sleeps; it says that it
 * sleeps, then looks again (shm_poll). */
void shm_link_wake(hxa_link *link) {
    uint32_t *armed = &link->peer->armed;
    if (shm_load_sc(armed) == 0 || shm_swap_sc(armed, 0u) == 0) return;
    if (shm_bell_ring(link->bell)) shm_add(&link->self->others.wakes_sent, 1);
}

/* ---- stop ------------------------------------------------------------------------------------------------------------ */

static void say_gone(hxa_link *link) {
    if (link->peer == NULL) return;
    shm_store_sc(&link->peer->gone, 1u);
    shm_link_wake(link);
}

/* In place of link->stops: the stop is over, nothing waits for it any more. */
static hxa_op over;

/* Who drops the last reference ends the stop.  Once `over` is there the loop may free the link. */
void shm_link_unref(hxa_link *link) {
    if (shm_sub_sc(&link->refs, 1u) != 1) return;
    const hxa_sink *sink = &link->self->sink;
    say_gone(link);
    for (hxa_op *op = shm_swap_sc(&link->stops, &over), *next; op != NULL && op != &over; op = next) {
        next = shm_job_of(op)->next;
        hxa_finish(sink, op);
    }
}

/* 0 if the stop is over already. */
static int wait_for_stop(hxa_link *link, hxa_op *op) {
    hxa_op *top = shm_load_sc(&link->stops);
    do {
        if (top == &over) return 0;
        shm_job_of(op)->next = top;
    } while (!__atomic_compare_exchange_n(&link->stops, &top, op, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return 1;
}

static void end_fence(hxa_link *link) {
    hxa_op *op = link->fence;
    link->fence = NULL;
    if (op != NULL) hxa_finish(&link->self->sink, op);
}

/* An op of the link's own life: not cancelled, not counted. */
static void adopt(hxa_link *link, hxa_op *op) {
    op->status = op->native = 0;
    op->scope = HXA_SCOPE_LINK;
    op->failed = -1;
    op->bytes = 0;
    *shm_job_of(op) = (shm_job){.link = link, .state = SHM_FINAL};
}

int shm_link_stop(hxa_link *link, int dead, hxa_op *op) {
    if (dead) {
        link->dead = 1;
        end_fence(link);
    }
    const int first = shm_swap_sc(&link->state, (uint32_t)SHM_STOPPED) != SHM_STOPPED;
    if (first && shm_load_sc(&link->refs) == 1) {       /* nothing is under way, and only the loop could begin something */
        shm_link_unref(link);
        return HXA_DONE;
    }
    adopt(link, op);
    if (!wait_for_stop(link, op)) return HXA_DONE;
    if (!first) return HXA_PENDING;    /* `dead` is known now; the first stop and this one end together */
    shm_pool_purge(link->self);
    shm_notes_pump(link);
    shm_link_unref(link);
    return HXA_PENDING;
}

/* The link broke by itself: say so once, and let the ops that it can't serve any more fail. */
void shm_link_break(hxa_link *link, int32_t status, const char *why) {
    if (__atomic_exchange_n(&link->down, 1, __ATOMIC_SEQ_CST)) return;
    uint32_t up = SHM_UP;
    __atomic_compare_exchange_n(&link->state, &up, SHM_DOWN, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    const hxa_event event = {
        .link = link->cookie,
        .kind = HXA_EVENT_LINK_DOWN,
        .status = status,
        .data = why,
        .data_len = (uint32_t)strlen(why),
    };
    link->self->sink.event(link->self->sink.ctx, &event);
    shm_pool_purge(link->self);
}

/* ---- fence ----------------------------------------------------------------------------------------------------------- */

/* A copy thread is about to write into the peer's memory: 0 if it must not.  Dekker: we count ourselves in, then look;
 * answer_fence says "fenced", then looks at the count. */
int shm_link_enter(hxa_link *link) {
    shm_add_sc(&link->flight, 1u);
    if (shm_load_sc(&link->fenced) == 0 && shm_link_open(link)) return 1;
    shm_link_leave(link);
    return 0;
}

static void say_fenced(hxa_link *link) {
    uint32_t asked = 1;
    if (!__atomic_compare_exchange_n(&link->fenced, &asked, 2, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return;
    shm_store_sc(&link->peer->fenced, 1u);
    shm_link_wake(link);
}

void shm_link_leave(hxa_link *link) {
    if (shm_sub_sc(&link->flight, 1u) == 1 && shm_load_sc(&link->fenced) == 1) say_fenced(link);
}

/* A device copies to mapped memory and from it, as a copy thread would. */
int shm_mem_borrow(hxa_link *link, hxa_mem *mem, void **address) {
    if (mem->link != link || mem->kind != SHM_MAPPED) return -HXA_E_UNSUPPORTED;
    if (!shm_link_enter(link)) return -HXA_E_LINK;
    shm_add_sc(&link->refs, 1u);
    *address = mem->base;
    return HXA_DONE;
}

void shm_mem_return(hxa_link *link, hxa_mem *mem) {
    (void)mem;
    shm_link_leave(link);
    shm_link_unref(link);
}

/* The loop: does the peer want us out of its memory?  Inline copies are not running now, this is their thread. */
static void answer_fence(hxa_link *link) {
    if (shm_load(&link->fenced) == 0) {
        if (shm_load_sc(&link->peer->fence) == 0) return;
        shm_store_sc(&link->fenced, 1u);
        shm_pool_purge(link->self);
    }
    if (shm_load_sc(&link->flight) == 0) say_fenced(link);
}

static int fence_came(hxa_link *link) { return shm_load_sc(&link->own->fenced) != 0 || shm_load_sc(&link->own->gone) != 0; }

int shm_link_fence(hxa_link *link, hxa_op *op) {
    if (link->peer == NULL || link->dead || fence_came(link)) return HXA_DONE;
    if (link->fence != NULL) return -HXA_E_BUSY;
    adopt(link, op);
    link->fence = op;
    shm_store_sc(&link->own->fence, 1u);
    shm_link_wake(link);
    return HXA_PENDING;
}

/* ---- poll ------------------------------------------------------------------------------------------------------------ */

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
        if (shm_load_sc(&own->want_space) != 0 && shm_swap_sc(&own->want_space, 0u) != 0) shm_link_wake(link);
    }
    if (answer == SHM_RING_CORRUPT) shm_link_break(link, HXA_E_PROTOCOL, "the peer wrote nonsense into the notification ring");
    return answer == SHM_RING_OK || budget == 0;
}

/* Is there anything that a poll would act on?  Asked after arming. */
static int waiting(hxa_link *link) {
    shm_half *own = link->own;
    if (link->fence != NULL && fence_came(link)) return 1;
    if (shm_load(&link->fenced) == 0 && shm_load_sc(&link->peer->fence) != 0) return 1;
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
    answer_fence(link);
    if (link->fence != NULL && fence_came(link)) end_fence(link);
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
