/* Stops of a link: the wrapped driver gets them once no late operation wants to land; they finish after all releases. */
#ifndef HXA_FAULTY_STOP_H
#define HXA_FAULTY_STOP_H

#include "link.h"
#include "operation.h"

FAULTY_INTERNAL int faulty_stop_add(hxa_link *link, int dead, hxa_op *op);
/* The loop's thread: pass the stops that the wrapped driver can have to it. */
FAULTY_INTERNAL void faulty_stops_issue(hxa_link *link);
/* Take the finished stops with the lock held, and finish them without it; after that the link may be freed. */
FAULTY_INTERNAL faulty_operation *faulty_stops_take(hxa_link *link);
FAULTY_INTERNAL void faulty_stops_finish(hxa_instance *self, faulty_operation *stops);

#endif /* HXA_FAULTY_STOP_H */
