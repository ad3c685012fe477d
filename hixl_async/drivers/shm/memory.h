/* Regions: allocated ones are segments, registered ones stay where they are and are reached by process_vm_*. */
#ifndef SHM_MEMORY_H
#define SHM_MEMORY_H

#include "base.h"

enum { SHM_MEM_MAGIC = 0x4d454d53 };

/* The content of hxa_metadata.data. */
typedef struct shm_mem_metadata {
    uint32_t magic;
    uint32_t version;
    uint32_t kind;                     /* SHM_OWNED: one descriptor; SHM_REGISTERED: none */
    uint32_t rights;
    uint64_t size;
    uint64_t address;                  /* SHM_REGISTERED: in the owner's address space */
} shm_mem_metadata;

SHM_INTERNAL int shm_mem_alloc(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **mem, void **address);
SHM_INTERNAL int shm_mem_register(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights,
                                  hxa_mem **mem);
SHM_INTERNAL int shm_mem_export(hxa_mem *mem, uint32_t rights, hxa_metadata *metadata);
SHM_INTERNAL int shm_mem_import(hxa_link *link, const hxa_metadata *metadata, uint64_t size, uint32_t rights, hxa_mem **mem,
                                hxa_op *op);
SHM_INTERNAL void shm_mem_release(hxa_mem *mem);

/* A device copies to mapped memory and from it, as a copy thread would. */
SHM_INTERNAL int shm_mem_borrow(hxa_link *link, hxa_mem *mem, void **address);
SHM_INTERNAL void shm_mem_return(hxa_link *link, hxa_mem *mem);

#endif /* SHM_MEMORY_H */
