/* The peer's process, and its memory that was registered where it lies: process_vm_readv and process_vm_writev. */
#ifndef SHM_PROCESS_H
#define SHM_PROCESS_H

#include "base.h"

#include <sys/uio.h>

typedef struct shm_process {
    int pidfd;                         /* -1: not found */
    int32_t number;                    /* in our pid namespace */
    int32_t error;                     /* why its memory cannot be reached, as errno; 0: it can */
} shm_process;

static const shm_process SHM_NO_PROCESS = {.pidfd = -1, .error = ESRCH};

/* Find a process by the number that the kernel has for it here, 0: none, and by the one that it has for itself.
 *
 * Never touches a page of that process, which may serve its own page faults (userfaultfd, FUSE) and make us wait for ever.  The
 * caller makes sure that the process was alive after this call: then its number had not passed to another one before. */
SHM_INTERNAL shm_process shm_process_find(uint32_t number, uint32_t own_number);

/* Close the process that was found, and treat it as unreachable from now on. */
SHM_INTERNAL void shm_process_drop(shm_process *process, int error);

/* Move bytes between our memory and that of the process, up to 64 pieces.  Return their number, which is less than asked for
 * where the next byte cannot be reached, or a negative errno; never 0. */
SHM_INTERNAL ssize_t shm_process_move(const shm_process *process, uint32_t verb, const struct iovec *here,
                                      const struct iovec *there, unsigned long n);

#endif /* SHM_PROCESS_H */
