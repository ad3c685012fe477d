/* Transfers and notifications: submitting them, ending them early, and the events of the wrapped driver about them. */
#ifndef HXA_FAULTY_WORK_H
#define HXA_FAULTY_WORK_H

#include "operation.h"

/* Why the last submit of this thread was refused, if the plan refused it; NULL otherwise. */
FAULTY_INTERNAL extern _Thread_local const char *faulty_refusal;

FAULTY_INTERNAL int faulty_submit(hxa_link *link, const hxa_batch *batch, hxa_op *op);
FAULTY_INTERNAL int faulty_cancel(hxa_link *link, hxa_op *op);
FAULTY_INTERNAL int faulty_abandon(hxa_link *link, hxa_op *op);
FAULTY_INTERNAL int faulty_waits(hxa_link *link, const hxa_op *op);
FAULTY_INTERNAL uint64_t faulty_progress(hxa_link *link, const hxa_op *op);
/* The loop's thread: submit the operations that are ready.  Return 1 if there are more. */
FAULTY_INTERNAL int faulty_submit_ready(hxa_link *link, uint32_t budget);

#endif /* HXA_FAULTY_WORK_H */
