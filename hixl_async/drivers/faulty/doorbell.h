/* The eventfd by which any thread makes the loop poll a link. */
#ifndef HXA_FAULTY_DOORBELL_H
#define HXA_FAULTY_DOORBELL_H

#include "link.h"

FAULTY_INTERNAL void faulty_doorbell_ring(hxa_link *link);
FAULTY_INTERNAL void faulty_doorbell_clear(hxa_link *link);

#endif /* HXA_FAULTY_DOORBELL_H */
