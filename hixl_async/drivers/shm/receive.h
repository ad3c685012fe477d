/* Everything that the peer sends: signals, notifications, and the end of the link. */
#ifndef SHM_RECEIVE_H
#define SHM_RECEIVE_H

#include "link.h"

SHM_INTERNAL int shm_link_fd(hxa_link *link);
SHM_INTERNAL int shm_poll(hxa_link *link, uint32_t budget);

#endif /* SHM_RECEIVE_H */
