/* One opened driver.
 *
 * Threads: every call into the wrapped driver comes from the loop's thread (T2).  The timer thread and the wrapped driver's
 * threads only change the state of operations, under `lock`, and post to the outer sink.  What has to be submitted later is
 * marked ready and the link's doorbell is rung, so that the loop polls.  No call to the sink or to the wrapped driver is made
 * with the lock held.
 */
#ifndef HXA_FAULTY_INSTANCE_H
#define HXA_FAULTY_INSTANCE_H

#include <pthread.h>

#include "control.h"
#include "hxa_driver.h"
#include "ring.h"
#include "timer.h"

struct faulty_operation;

struct hxa_mem {
    hxa_instance *self;
    hxa_mem *inner;
};

struct hxa_instance {
    hxa_instance *next;       /* of all instances; under the registry's lock */
    const hxa_driver *table;  /* `wrapped` */
    hxa_driver wrapped;       /* a copy of the wrapped driver's table, which may be shorter: the rest is NULL */
    hxa_instance *inner;
    hxa_sink outer, sink;     /* the core's; ours, given to the wrapped driver: it refers to this object */
    faulty_block *block;
    faulty_block own_block;   /* where no control block was given */
    uint64_t seed;
    pthread_t loop;
    hxa_link *links;          /* changed by the loop under the registry's lock */
    struct faulty_operation *dead;                                /* atomic stack, emptied by the loop */
    uint64_t call_count;      /* the loop's */

    pthread_mutex_t lock;     /* of all below, and of links and operations where they say so */
    faulty_timer timer;
    faulty_node calls;        /* calls without a link whose report waits */
    uint32_t pools;           /* reorder pools so far */
};

#endif /* HXA_FAULTY_INSTANCE_H */
