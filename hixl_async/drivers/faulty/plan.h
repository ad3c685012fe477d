/* The effects of a plan's rules on one operation. */
#ifndef HXA_FAULTY_PLAN_H
#define HXA_FAULTY_PLAN_H

#include "control.h"
#include "hxa_driver.h"

typedef struct faulty_effects {
    uint32_t any;             /* at least one of the fields below is set */
    uint32_t busy, drop, hold, late, stuck, pending, fail;
    uint64_t delay, outcome_delay, note_delay;                    /* ns */
    uint64_t bandwidth;
    uint64_t window, within;                                      /* of a reorder */
    uint64_t stall;           /* ppm of the bytes, + 1; 0: none */
    int64_t index;
    int32_t status, native;
    uint32_t scope;
} faulty_effects;

/* The effects on a batch, and its number in the plan. */
FAULTY_INTERNAL void faulty_plan_batch(faulty_block *block, uint64_t seed, const hxa_batch *batch, faulty_effects *effects, uint64_t *number);
FAULTY_INTERNAL void faulty_plan_verb(faulty_block *block, uint64_t seed, uint32_t verb, faulty_effects *effects);
FAULTY_INTERNAL uint64_t faulty_random(uint64_t seed, uint64_t a, uint64_t b);

#endif /* HXA_FAULTY_PLAN_H */
