/* The resources of the machine and of its container that this process may still use. */
#ifndef SHM_LIMITS_H
#define SHM_LIMITS_H

#include "base.h"

typedef struct shm_room {
    uint64_t left;                     /* bytes that can be allocated without the kernel killing a process */
    uint64_t limit;                    /* bytes that are allowed in total, UINT64_MAX: known by `left` only */
    char source[256];                  /* the file that says so */
} shm_room;

/* Return the tightest of the machine's memory and the limits of the memory cgroups (version 1 or 2) that this process is in.
 * `root` is put before every path: "" but in tests. */
SHM_INTERNAL shm_room shm_memory_room(const char *root);

/* Describe the limit that a call which failed with this errno has met: its value, and how to raise it.  Return the length of
 * the text, 0 if the errno is about no limit. */
SHM_INTERNAL int shm_limit_describe(const char *root, int error, char *text, size_t size);

#endif /* SHM_LIMITS_H */
