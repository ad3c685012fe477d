/* One accepted operation: its state, its life, and the calls back that its kind answers. */
#ifndef HXA_FAULTY_OPERATION_H
#define HXA_FAULTY_OPERATION_H

#include "instance.h"
#include "plan.h"
#include "ring.h"
#include "timer.h"

typedef struct faulty_operation faulty_operation;

typedef struct faulty_kind {
    void (*posted)(faulty_operation *operation, uint32_t events);       /* by the wrapped driver; any thread, without the lock */
    void (*due)(faulty_operation *operation);                           /* its alarm rings; see faulty_alarm.ring */
    void (*released)(faulty_operation *operation);                      /* by the plan; with the lock held */
} faulty_kind;

enum { FAULTY_OPEN = 0, FAULTY_UNTIL = 1, FAULTY_HELD = 2 };      /* a step waits for nothing, for a time, for a release */

typedef struct faulty_step {  /* one submit to the wrapped driver */
    size_t first, n;          /* descriptors */
    uint64_t bytes;
    uint32_t tail;            /* with the signal and the notification */
    uint32_t wait;            /* before it */
    uint64_t delay;           /* of FAULTY_UNTIL */
} faulty_step;

enum { FAULTY_STEPS = 3 };

enum {                        /* faulty_operation.stage */
    FAULTY_WAITING = 0,       /* for time, release or the loop: the wrapped driver does not have it */
    FAULTY_SUBMITTED = 1,     /* the wrapped driver has it */
    FAULTY_REPORTING = 2,     /* all done, the report waits */
    FAULTY_OVER = 3           /* released; the loop frees it later */
};

struct faulty_operation {
    faulty_node all;          /* in link->operations, link->stops or self->calls; first, see faulty_operation_of */
    faulty_node ready;        /* in link->ready, or alone */
    faulty_operation *chain;  /* in a private list */
    faulty_alarm alarm;
    hxa_op op;                /* ours; the wrapped driver's while SUBMITTED */
    hxa_op *outer;
    hxa_instance *self;
    hxa_link *link;           /* NULL for a call without one */
    hxa_mem *mem;             /* of a retirement: released by the loop together with the operation */
    const faulty_kind *kind;
    uint32_t stage;
    uint32_t seen;            /* events of the wrapped driver for this step */
    uint32_t accepted;        /* submit answered PENDING: the outer op is ours until released */
    uint32_t reported;        /* COMPLETED was posted */
    uint32_t held;            /* waits for a release */
    uint32_t landing;         /* late, and given up: its outcome is reported already */
    uint32_t events;          /* to post, in a private list */
    uint32_t pool;            /* number of the reorder pool, 0: none */
    uint32_t dead;            /* of a stop: the peer's process is gone */
    uint64_t begun, end;      /* on the wire, for progress */
    uint64_t moved;           /* bytes of steps that are over */
    faulty_effects effects;
    const hxa_batch *batch;   /* the core's */
    hxa_batch part;           /* of the current step */
    hxa_desc *desc;           /* translated */
    size_t split;             /* index of the second half of a divided descriptor, 0: none */
    faulty_step steps[FAULTY_STEPS];
    uint32_t step, step_count;
};

#define faulty_operation_of(node) ((faulty_operation *)(void *)(node))
#define faulty_ready_of(node) ((faulty_operation *)(void *)((char *)(node) - offsetof(faulty_operation, ready)))

FAULTY_INTERNAL faulty_operation *faulty_operation_new(hxa_instance *self, hxa_link *link, hxa_op *outer, const faulty_kind *kind);
FAULTY_INTERNAL void faulty_operation_free(faulty_operation *operation);        /* the loop's thread */
FAULTY_INTERNAL void faulty_operation_free_later(faulty_operation *operation);  /* any thread */
FAULTY_INTERNAL void faulty_operation_free_dead(hxa_instance *self);            /* the loop's thread */
FAULTY_INTERNAL void faulty_post(void *ctx, hxa_op *op, uint32_t events);       /* the wrapped driver's sink; any thread */
/* With the lock held: */
FAULTY_INTERNAL void faulty_operation_hold(faulty_operation *operation);
FAULTY_INTERNAL void faulty_operation_unwait(faulty_operation *operation);      /* waits for nothing any more */

#endif /* HXA_FAULTY_OPERATION_H */
