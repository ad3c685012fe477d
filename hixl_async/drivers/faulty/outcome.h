/* The outcome of a transfer or notification, as it is reported to the core. */
#ifndef HXA_FAULTY_OUTCOME_H
#define HXA_FAULTY_OUTCOME_H

#include "operation.h"

/* With the lock held: */
FAULTY_INTERNAL void faulty_outcome_set(faulty_operation *operation, int32_t status, int32_t native, uint32_t scope, int64_t failed);
/* Set the outcome that the plan or the wrapped driver gave. */
FAULTY_INTERNAL void faulty_outcome_report(faulty_operation *operation);
FAULTY_INTERNAL int faulty_outcome_is_later(const faulty_operation *operation);
FAULTY_INTERNAL void faulty_outcome_report_later(faulty_operation *operation);
/* Remove the operation, so that neither its op nor its link leads to it any more; deliver follows. */
FAULTY_INTERNAL void faulty_outcome_close(faulty_operation *operation);
/* Report, unless that is done, and close.  Return the events to deliver. */
FAULTY_INTERNAL uint32_t faulty_outcome_end(faulty_operation *operation);
/* Without the lock: post the events; RELEASED ends the operation. */
FAULTY_INTERNAL void faulty_outcome_deliver(faulty_operation *operation, uint32_t events);

/* The link stops, or the plan breaks it: end the operations that the wrapped driver does not have; late ones only report. */
FAULTY_INTERNAL void faulty_outcome_give_up(hxa_link *link, int stop);
FAULTY_INTERNAL void faulty_outcome_break(hxa_link *link);

#endif /* HXA_FAULTY_OUTCOME_H */
