/* Reorder pools: operations of a link that are collected, and then go on in another order. */
#ifndef HXA_FAULTY_REORDER_H
#define HXA_FAULTY_REORDER_H

#include "operation.h"

/* With the lock held: */
FAULTY_INTERNAL void faulty_reorder_enter(faulty_operation *operation, uint64_t now);
/* The alarm of an operation in a pool rings: its pool is complete. */
FAULTY_INTERNAL void faulty_reorder_due(faulty_operation *operation);

#endif /* HXA_FAULTY_REORDER_H */
