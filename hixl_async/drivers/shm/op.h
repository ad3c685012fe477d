/* The life of an accepted transfer or import. */
#ifndef SHM_OP_H
#define SHM_OP_H

#include "link.h"

/* The loop: from here on T4 applies. */
SHM_INTERNAL void shm_op_accept(hxa_op *op, hxa_link *link, const void *what, uint16_t kind);

/* From here on it is too late to cancel.  Return 0, or HXA_E_CANCELLED if the op was cancelled before. */
SHM_INTERNAL int32_t shm_op_decide(hxa_op *op);

/* Completion and release in one; the op is the core's again, and the link may go. */
SHM_INTERNAL void shm_op_finish(hxa_op *op);

#endif /* SHM_OP_H */
