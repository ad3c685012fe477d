/* Waits of an operation before its steps: for a time, or for a release from Python.
 *
 * The wrapped driver has not seen the step meanwhile, so that bytes which are late really land late.
 */
#ifndef HXA_FAULTY_WAIT_H
#define HXA_FAULTY_WAIT_H

#include "operation.h"

/* With the lock held: return 1 if the operation has to wait before its first step, or before its next one. */
FAULTY_INTERNAL int faulty_wait_first(faulty_operation *operation);
FAULTY_INTERNAL int faulty_wait_next(faulty_operation *operation);
/* End the wait of an operation, which now waits for the loop only. */
FAULTY_INTERNAL void faulty_wait_over(faulty_operation *operation);

#endif /* HXA_FAULTY_WAIT_H */
