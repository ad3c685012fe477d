/* Making a link: our half, and the join with what the peer says of its own. */
#ifndef SHM_CONNECT_H
#define SHM_CONNECT_H

#include "base.h"

enum { SHM_LINK_MAGIC = 0x4b4e4c53 };

/* The content of hxa_metadata.data. */
typedef struct shm_link_metadata {
    uint32_t pid;                      /* as the kernel has it at the receiver, by the rule of HXA_CAP_SAME_HOST; 0: unknown */
    uint32_t magic;
    uint32_t version;
    uint32_t capacity;                 /* of the ring in the segment */
    uint32_t own_pid;                  /* as its maker has it, which may live in another pid namespace */
    uint32_t unused;
} shm_link_metadata;

SHM_INTERNAL int shm_link_new(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_metadata *metadata);
SHM_INTERNAL int shm_link_connect(hxa_link *link, const hxa_metadata *metadata, hxa_op *op);
SHM_INTERNAL void shm_link_free(hxa_link *link);

#endif /* SHM_CONNECT_H */
