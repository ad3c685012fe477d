/* The steps of an operation: the submits to the wrapped driver that its batch is divided into.  Most have one. */
#ifndef HXA_FAULTY_STEPS_H
#define HXA_FAULTY_STEPS_H

#include "operation.h"

/* Divide the batch as the effects ask for. */
FAULTY_INTERNAL int faulty_steps_plan(faulty_operation *operation, const hxa_batch *batch);
/* Make `part` and `op` those of the current step. */
FAULTY_INTERNAL void faulty_steps_load(faulty_operation *operation);
/* Return the index of the failed descriptor in the core's batch, or -1 if it is unknown. */
FAULTY_INTERNAL int64_t faulty_steps_failed(const faulty_operation *operation);

#endif /* HXA_FAULTY_STEPS_H */
