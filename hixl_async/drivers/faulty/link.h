/* A link: the wrapped driver's, and what is ours around it. */
#ifndef HXA_FAULTY_LINK_H
#define HXA_FAULTY_LINK_H

#include "instance.h"
#include "ring.h"

struct hxa_link {
    hxa_link *next;           /* links of the instance; changed by the loop under the registry's lock */
    hxa_instance *self;
    hxa_link *inner;
    uint64_t cookie;
    int doorbell, set;        /* eventfd; epoll of it and of the inner link's descriptor */
    uint32_t down;            /* atomic: broken by the plan */
    uint32_t breaking;        /* atomic: the loop is to break it at the next poll */
    /* Under the lock. */
    uint32_t stopping;
    uint32_t pool, pooled;    /* the reorder pool that fills now, and its size */
    uint64_t pool_window, pool_due;
    uint64_t wire;            /* when the virtual wire is free */
    size_t notes;             /* operations with a notification that was sent and whose report waits */
    uint64_t notes_due;       /* when the last of them reports: they do in the order in which they were sent (T5) */
    size_t live;              /* operations whose release is not posted yet */
    faulty_node operations, ready, stops;
};

FAULTY_INTERNAL int faulty_link_new(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_metadata *metadata);
FAULTY_INTERNAL int faulty_link_pace(hxa_link *link, uint64_t bytes_per_second);
FAULTY_INTERNAL int faulty_link_fd(hxa_link *link);
FAULTY_INTERNAL int faulty_link_stop(hxa_link *link, int dead, hxa_op *op);
FAULTY_INTERNAL void faulty_link_free(hxa_link *link);
FAULTY_INTERNAL int faulty_poll(hxa_link *link, uint32_t budget);
FAULTY_INTERNAL void faulty_event(void *ctx, const hxa_event *event);   /* the wrapped driver's sink; any thread */

#endif /* HXA_FAULTY_LINK_H */
