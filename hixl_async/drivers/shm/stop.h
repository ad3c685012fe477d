/* The end of our side of a link. */
#ifndef SHM_STOP_H
#define SHM_STOP_H

#include "link.h"

SHM_INTERNAL int shm_link_stop(hxa_link *link, int dead, hxa_op *op);

#endif /* SHM_STOP_H */
