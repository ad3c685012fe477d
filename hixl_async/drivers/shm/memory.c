#include "memory.h"

#include <stdlib.h>

#include "descriptor.h"
#include "op.h"
#include "region.h"
#include "segment.h"
#include "workers.h"

enum { IMPORT_AT_ONCE = 4 * SHM_PAGE };       /* populating more than this is a copy thread's work */
static const uint32_t ALL_RIGHTS = HXA_RIGHT_READ | HXA_RIGHT_WRITE;

static hxa_mem *mem_new(hxa_instance *self, uint32_t kind, uint32_t rights, uint64_t size) {
    hxa_mem *mem = (hxa_mem *)calloc(1, sizeof *mem);
    if (mem == NULL) return NULL;
    mem->self = self;
    mem->kind = kind;
    mem->rights = rights;
    mem->size = size;
    mem->fd = -1;
    mem->next = self->memories;
    if (mem->next != NULL) mem->next->prev = mem;
    self->memories = mem;
    shm_bump(&self->loop.memories, 1);
    return mem;
}

void shm_mem_release(hxa_mem *mem) {
    hxa_instance *self = mem->self;
    if (mem->kind == SHM_OWNED) shm_segment_unmap(mem->base, mem->mapped);
    else shm_segment_unmap_peer(mem->base, mem->mapped);
    shm_fd_close(mem->fd);
    if (mem->next != NULL) mem->next->prev = mem->prev;
    if (mem->prev != NULL) mem->prev->next = mem->next;
    else self->memories = mem->next;
    shm_store(&self->loop.memories, self->loop.memories - 1);
    free(mem);
}

int shm_mem_alloc(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **mem, void **address) {
    if (size == 0 || (rights & ~ALL_RIGHTS)) return -HXA_E_INVALID;
    hxa_mem *made = mem_new(self, SHM_OWNED, rights, size);
    if (made == NULL) return -HXA_E_NOMEM;
    const uint64_t bytes = shm_pages(size);
    int status = shm_segment_create("hixl_async:region", bytes, &made->fd);
    if (status == 0) status = shm_segment_map(made->fd, bytes, &made->base);
    if (status == 0) {
        made->mapped = bytes;
        status = shm_segment_seal(made->fd, !(rights & HXA_RIGHT_WRITE));
    }
    if (status != 0) {
        shm_mem_release(made);
        return status;
    }
    *mem = made;
    *address = made->base;
    return 0;
}

int shm_mem_register(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights, hxa_mem **mem) {
    if (kind != HXA_KIND_HOST) return -HXA_E_UNSUPPORTED;
    if (size == 0 || address == NULL || (rights & ~ALL_RIGHTS) || (uintptr_t)address + size < size) return -HXA_E_INVALID;
    hxa_mem *made = mem_new(self, SHM_REGISTERED, rights, size);
    if (made == NULL) return -HXA_E_NOMEM;
    made->base = (uint8_t *)address;
    *mem = made;
    return 0;
}

int shm_mem_export(hxa_mem *mem, uint32_t rights, hxa_metadata *metadata) {
    if (mem->kind != SHM_OWNED && mem->kind != SHM_REGISTERED) return -HXA_E_INVALID;
    if (rights == 0 || (rights & ~ALL_RIGHTS)) return -HXA_E_INVALID;
    if (rights & ~mem->rights) return -HXA_E_RIGHTS;
    const shm_mem_metadata about = {
        .magic = SHM_MEM_MAGIC, .version = SHM_VERSION, .kind = mem->kind, .rights = rights, .size = mem->size,
        .address = mem->kind == SHM_REGISTERED ? (uint64_t)(uintptr_t)mem->base : 0};
    memset(metadata, 0, sizeof *metadata);
    if (mem->kind == SHM_OWNED) {
        /* The seal on a region that no peer may write to holds for every descriptor; else a reader needs one that cannot write. */
        if ((mem->rights & HXA_RIGHT_WRITE) && !(rights & HXA_RIGHT_WRITE)) {
            const int status = shm_segment_reader(mem->fd, &metadata->fds[0]);
            if (status != 0) return status;
        } else {
            const int status = shm_fd_duplicate(mem->fd, &metadata->fds[0]);
            if (status != 0) return status;
        }
        metadata->nfds = 1;
    }
    metadata->len = sizeof about;
    memcpy(metadata->data, &about, sizeof about);
    return 0;
}

/* The segment is checked before it is mapped, and its descriptor is closed whatever comes out. */
static int import_segment(hxa_mem *made, const hxa_metadata *metadata, uint32_t rights) {
    if (metadata->nfds != 1) return -HXA_E_PROTOCOL;
    int status = shm_segment_check(metadata->fds[0], made->size);
    if (status != 0) return status;
    const uint64_t bytes = shm_pages(made->size);
    status = shm_segment_map_peer(metadata->fds[0], bytes, (rights & HXA_RIGHT_WRITE) != 0, &made->base);
    if (status == 0) made->mapped = bytes;
    return status;
}

static int import_start(hxa_link *link, const hxa_metadata *metadata, const shm_mem_metadata *about, uint32_t rights, hxa_mem **mem,
                        hxa_op *op) {
    hxa_mem *made = mem_new(link->self, about->kind == SHM_OWNED ? SHM_MAPPED : SHM_REMOTE, rights, about->size);
    if (made == NULL) return -HXA_E_NOMEM;
    made->link = link;
    int status = 0;
    if (made->kind == SHM_REMOTE) made->base = (uint8_t *)(uintptr_t)about->address;
    else status = import_segment(made, metadata, rights);
    if (status == 0 && made->mapped > IMPORT_AT_ONCE) {
        status = shm_workers_ready(link->self, 0, 0);
        if (status == 0) {
            *mem = made;
            shm_op_accept(op, link, made, SHM_IMPORT);
            shm_pool_push(&link->self->pool, op);
            return HXA_PENDING;
        }
    } else if (status == 0 && made->mapped != 0) {
        const int error = shm_segment_populate(made->base, made->mapped, (rights & HXA_RIGHT_WRITE) != 0);
        if (error != 0) status = shm_refusal_of(error);
    }
    if (status != 0) {
        shm_mem_release(made);
        return status;
    }
    *mem = made;
    return HXA_DONE;
}

int shm_mem_import(hxa_link *link, const hxa_metadata *metadata, uint64_t size, uint32_t rights, hxa_mem **mem, hxa_op *op) {
    shm_mem_metadata about;
    int status;
    if (metadata->len != sizeof about) {
        status = -HXA_E_PROTOCOL;
    } else {
        memcpy(&about, metadata->data, sizeof about);
        if (shm_load(&link->state) != SHM_UP) status = -HXA_E_LINK;
        else if (rights == 0 || (rights & ~ALL_RIGHTS) || size == 0) status = -HXA_E_INVALID;
        else if (about.magic != SHM_MEM_MAGIC || about.version != SHM_VERSION) status = -HXA_E_PROTOCOL;
        else if (about.kind != SHM_OWNED && about.kind != SHM_REGISTERED) status = -HXA_E_PROTOCOL;
        else if (about.size != size || (about.kind == SHM_REGISTERED && metadata->nfds != 0)) status = -HXA_E_PROTOCOL;
        else if (about.kind == SHM_REGISTERED && (about.address == 0 || about.address + size < size)) status = -HXA_E_PROTOCOL;
        else if (rights & ~about.rights) status = -HXA_E_RIGHTS;
        else if (about.kind == SHM_REGISTERED && link->process.error != 0)
            status = HXA_REFUSAL(HXA_E_RIGHTS, link->process.error);
        else status = import_start(link, metadata, &about, rights, mem, op);
    }
    shm_metadata_close(metadata);
    return status < 0 ? shm_refuse(op, status) : status;
}

int shm_mem_borrow(hxa_link *link, hxa_mem *mem, void **address) {
    if (mem->link != link || mem->kind != SHM_MAPPED) return -HXA_E_UNSUPPORTED;
    if (!shm_link_enter(link)) return -HXA_E_LINK;
    shm_add_sc(&link->refs, 1u);
    *address = mem->base;
    return HXA_DONE;
}

void shm_mem_return(hxa_link *link, hxa_mem *mem) {
    (void)mem;
    shm_link_leave(link);
    shm_link_unref(link);
}
