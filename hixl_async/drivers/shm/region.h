/* Memory of ours, or of a peer. */
#ifndef SHM_REGION_H
#define SHM_REGION_H

#include "base.h"

enum { SHM_OWNED = 1, SHM_REGISTERED = 2, SHM_MAPPED = 3, SHM_REMOTE = 4 };

struct hxa_mem {
    hxa_instance *self;
    hxa_mem *next, *prev;              /* all memories of the instance, for after_fork */
    hxa_link *link;                    /* imported: whose; compared only, it may be gone */
    uint8_t *base;                     /* where it lies here; SHM_REMOTE: in the peer */
    uint64_t size;                     /* bytes that may be used */
    uint64_t mapped;                   /* bytes of address space to unmap, 0: none */
    uint32_t kind;                     /* SHM_OWNED or SHM_REGISTERED: ours; SHM_MAPPED or SHM_REMOTE: a peer's */
    uint32_t rights;                   /* the most that was, or may be, granted */
    int fd;                            /* SHM_OWNED: the segment */
};

#endif /* SHM_REGION_H */
