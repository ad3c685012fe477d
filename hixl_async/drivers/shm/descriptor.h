/* File descriptors that travel between processes. */
#ifndef SHM_DESCRIPTOR_H
#define SHM_DESCRIPTOR_H

#include "base.h"

/* Duplicate a descriptor of ours.  Return 0 or a refusal. */
SHM_INTERNAL int shm_fd_duplicate(int fd, int *copy);

/* Close a descriptor of ours, if there is one. */
SHM_INTERNAL void shm_fd_close(int fd);

/* Close descriptors that a peer gave us, without waiting for what lies behind them. */
SHM_INTERNAL void shm_fd_close_foreign(int fd);
SHM_INTERNAL void shm_metadata_close(const hxa_metadata *metadata);

#endif /* SHM_DESCRIPTOR_H */
