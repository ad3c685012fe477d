/* The mailbox: many threads post ops and events, one thread (the loop's) takes them.
 *
 * Two intrusive lists with one eventfd.  Nothing here can overflow: an op carries its own list pointer, an event is one malloc.
 * The eventfd is written only when the consumer has armed the mailbox, so a burst costs one wake-up; the consumer arms, then
 * looks again (Dekker's pattern: both sides store, fence, then load), so that no post is missed.
 */
#ifndef HXA_MAILBOX_H
#define HXA_MAILBOX_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "hxa_driver.h"

typedef struct hxa_event_node {    /* an event on its way to the loop */
    struct hxa_event_node *next;
    hxa_event event;               /* topic and data point into text */
    uint8_t text[];
} hxa_event_node;

typedef struct hxa_mailbox {
    hxa_op *ops;                   /* newest first */
    hxa_event_node *event_nodes;   /* newest first */
    int fd;                        /* eventfd, nonblocking: the loop's reader */
    uint32_t armed;                /* the consumer sleeps and wants a signal */
    uint64_t signals;              /* eventfd writes so far */
    uint64_t lost;                 /* events lost because malloc failed */
} hxa_mailbox;

static inline int hxa_mailbox_open(hxa_mailbox *box) {
    memset(box, 0, sizeof *box);
    box->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    box->armed = 1;
    return box->fd < 0 ? -errno : 0;
}

static inline void hxa_mailbox_signal(hxa_mailbox *box) {
    /* The fence orders our push before the load of armed; its partner is in hxa_mailbox_arm. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&box->armed, __ATOMIC_RELAXED) && __atomic_exchange_n(&box->armed, 0, __ATOMIC_ACQ_REL)) {
        const uint64_t one = 1;
        __atomic_add_fetch(&box->signals, 1, __ATOMIC_RELAXED);
        ssize_t written;
        do written = write(box->fd, &one, sizeof one);
        while (written < 0 && errno == EINTR);
    }
}

/* sink->post.  The first event of an op queues it; a second one before the drain only adds its bit. */
static inline void hxa_mailbox_post(void *ctx, hxa_op *op, uint32_t events) {
    hxa_mailbox *box = (hxa_mailbox *)ctx;
    if (__atomic_fetch_or(&op->events, events, __ATOMIC_ACQ_REL) != 0) return;
    hxa_op *head = __atomic_load_n(&box->ops, __ATOMIC_RELAXED);
    do op->next = head;
    while (!__atomic_compare_exchange_n(&box->ops, &head, op, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
    hxa_mailbox_signal(box);
}

/* sink->event. */
static inline void hxa_mailbox_event(void *ctx, const hxa_event *event) {
    hxa_mailbox *box = (hxa_mailbox *)ctx;
    hxa_event_node *node = (hxa_event_node *)malloc(sizeof *node + event->topic_len + event->data_len);
    if (node == NULL) {
        __atomic_add_fetch(&box->lost, 1, __ATOMIC_RELAXED);
        return;
    }
    node->event = *event;
    node->event.topic = node->text;
    node->event.data = node->text + event->topic_len;
    if (event->topic_len) memcpy(node->text, event->topic, event->topic_len);
    if (event->data_len) memcpy(node->text + event->topic_len, event->data, event->data_len);
    hxa_event_node *head = __atomic_load_n(&box->event_nodes, __ATOMIC_RELAXED);
    do node->next = head;
    while (!__atomic_compare_exchange_n(&box->event_nodes, &head, node, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
    hxa_mailbox_signal(box);
}

/* Consumer: return everything posted so far, oldest first. */
static inline hxa_op *hxa_mailbox_take_ops(hxa_mailbox *box) {
    hxa_op *op = __atomic_exchange_n(&box->ops, NULL, __ATOMIC_ACQUIRE), *first = NULL;
    while (op != NULL) {
        hxa_op *next = op->next;
        op->next = first;
        first = op;
        op = next;
    }
    return first;
}

static inline hxa_event_node *hxa_mailbox_take_event_nodes(hxa_mailbox *box) {
    hxa_event_node *node = __atomic_exchange_n(&box->event_nodes, NULL, __ATOMIC_ACQUIRE), *first = NULL;
    while (node != NULL) {
        hxa_event_node *next = node->next;
        node->next = first;
        first = node;
        node = next;
    }
    return first;
}

/* Consumer: return the events of a taken op.  Read op->next before, because a later event may queue the op again at once. */
static inline uint32_t hxa_mailbox_events(hxa_op *op) { return __atomic_exchange_n(&op->events, 0, __ATOMIC_ACQ_REL); }

/* Consumer: it will take soon without a signal. */
static inline void hxa_mailbox_awake(hxa_mailbox *box) { __atomic_store_n(&box->armed, 0, __ATOMIC_RELAXED); }

/* Consumer: return 1 if the next post writes a signal; 0 means that it is awake, or that a signal is on its way. */
static inline int hxa_mailbox_asleep(const hxa_mailbox *box) { return (int)__atomic_load_n(&box->armed, __ATOMIC_RELAXED); }

/* Any thread: return the number of times that the eventfd was written. */
static inline uint64_t hxa_mailbox_signals(const hxa_mailbox *box) { return __atomic_load_n(&box->signals, __ATOMIC_RELAXED); }

/* Consumer: reset the descriptor, which was readable.  A drain for another reason leaves a signal where it is. */
static inline void hxa_mailbox_clear(hxa_mailbox *box) {
    uint64_t count;
    ssize_t got = read(box->fd, &count, sizeof count);
    (void)got;
}

/* Consumer: prepare to sleep.  Returns 1 if something was posted meanwhile; then it is still awake and must take again. */
static inline int hxa_mailbox_arm(hxa_mailbox *box) {
    __atomic_store_n(&box->armed, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&box->ops, __ATOMIC_RELAXED) == NULL && __atomic_load_n(&box->event_nodes, __ATOMIC_RELAXED) == NULL) return 0;
    /* A producer that disarmed it first has sent a signal, which will find a consumer that has drained: harmless. */
    __atomic_store_n(&box->armed, 0, __ATOMIC_RELAXED);
    return 1;
}

static inline void hxa_mailbox_close(hxa_mailbox *box) {
    for (hxa_event_node *node = hxa_mailbox_take_event_nodes(box); node != NULL;) {
        hxa_event_node *next = node->next;
        free(node);
        node = next;
    }
    if (box->fd >= 0) close(box->fd);
    box->fd = -1;
}

#endif /* HXA_MAILBOX_H */
