/* Calls of transports that block: start, shutdown, link_connect, mem_ready, mem_retire; and those that are passed on as they are.
 *
 * The wrapped driver is asked at once, where it has the call; the plan delays, holds or spoils the report.  So a driver
 * without such calls can be made to behave like one that has them.
 */
#ifndef HXA_FAULTY_CALL_H
#define HXA_FAULTY_CALL_H

#include "operation.h"

FAULTY_INTERNAL int faulty_start(hxa_instance *self, hxa_op *op);
FAULTY_INTERNAL int faulty_shutdown(hxa_instance *self, hxa_op *op);
FAULTY_INTERNAL int faulty_mem_ready(hxa_mem *mem, hxa_op *op);
FAULTY_INTERNAL int faulty_mem_retire(hxa_mem *mem, hxa_op *op);
FAULTY_INTERNAL int faulty_link_connect(hxa_link *link, const hxa_metadata *metadata, hxa_op *op);
FAULTY_INTERNAL int faulty_link_fence(hxa_link *link, hxa_op *op);
/* An operation for a call of the wrapped driver that no rule applies to; NULL: no memory. */
FAULTY_INTERNAL faulty_operation *faulty_call_forward(hxa_link *link, hxa_op *op);

#endif /* HXA_FAULTY_CALL_H */
