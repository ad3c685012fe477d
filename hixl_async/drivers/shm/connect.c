#include "connect.h"

#include <stdlib.h>
#include <unistd.h>

#include "descriptor.h"
#include "doorbell.h"
#include "link.h"
#include "segment.h"

static hxa_link *link_alloc(hxa_instance *self, uint64_t cookie) {
    hxa_link *link = (hxa_link *)calloc(1, sizeof *link);
    if (link == NULL) return NULL;
    link->self = self;
    link->cookie = cookie;
    link->bell = link->bell_read = link->peer_bell = -1;
    link->capacity = self->capacity;
    link->refs = 1;
    link->process = SHM_NO_PROCESS;
    link->next = self->links;
    if (link->next != NULL) link->next->prev = link;
    self->links = link;
    shm_bump(&self->loop.links, 1);
    return link;
}

static uint64_t half_bytes(uint32_t capacity) { return shm_pages(SHM_PAGE + (uint64_t)capacity); }

void shm_link_free(hxa_link *link) {
    hxa_instance *self = link->self;
    if (link->fence != NULL) {         /* no answer came: the peer may still write */
        link->fence->status = HXA_E_LINK;
        link->fence->scope = HXA_SCOPE_LINK;
        hxa_finish(&self->sink, link->fence);
    }
    if (link->own != NULL) shm_segment_unmap_peer((uint8_t *)link->own, half_bytes(link->capacity));
    if (link->peer != NULL) shm_segment_unmap_peer((uint8_t *)link->peer, half_bytes(link->peer_capacity));
    shm_fd_close(link->bell);
    shm_fd_close(link->bell_read);
    shm_fd_close(link->peer_bell);
    shm_process_drop(&link->process, ESRCH);
    if (link->next != NULL) link->next->prev = link->prev;
    if (link->prev != NULL) link->prev->next = link->next;
    else self->links = link->next;
    shm_store(&self->loop.links, self->loop.links - 1);
    free(link);
}

int shm_link_new(hxa_instance *self, uint64_t cookie, hxa_link **made, hxa_metadata *metadata) {
    hxa_link *link = link_alloc(self, cookie);
    if (link == NULL) return -HXA_E_NOMEM;
    int segment = -1, passed = -1;
    uint8_t *base = NULL;
    int status = shm_bell_new(&link->bell, &link->bell_read);
    if (status == 0) status = shm_fd_duplicate(link->bell_read, &passed);
    if (status == 0) status = shm_segment_create("hixl_async:link", half_bytes(link->capacity), &segment);
    if (status == 0) status = shm_segment_map_peer(segment, half_bytes(link->capacity), 1, &base);
    if (status == 0) {
        link->own = (shm_half *)(void *)base;
        status = shm_segment_seal(segment, 0);
    }
    if (status != 0) {
        shm_fd_close(segment);
        shm_fd_close(passed);
        shm_link_free(link);
        return status;
    }
    link->own->magic = SHM_HALF_MAGIC;
    link->own->capacity = link->capacity;
    link->own->armed = 1;              /* the first word of the peer rings */
    const shm_link_metadata about = {
        .pid = (uint32_t)getpid(), .magic = SHM_LINK_MAGIC, .version = SHM_VERSION, .capacity = link->capacity,
        .own_pid = (uint32_t)getpid()};
    memset(metadata, 0, sizeof *metadata);
    metadata->len = sizeof about;
    memcpy(metadata->data, &about, sizeof about);
    metadata->nfds = 2;
    metadata->fds[0] = segment;
    metadata->fds[1] = passed;
    *made = link;
    return 0;
}

static int capacity_makes_sense(uint32_t capacity) {
    return capacity >= SHM_PAGE && capacity <= SHM_RING_MAX && (capacity & (capacity - 1)) == 0;
}

/* All checks, then everything that can fail, then the link is up. */
static int join(hxa_link *link, const hxa_metadata *metadata) {
    shm_link_metadata about;
    if (link->state != SHM_NEW) return -HXA_E_INVALID;
    if (metadata->len != sizeof about || metadata->nfds != 2) return -HXA_E_PROTOCOL;
    memcpy(&about, metadata->data, sizeof about);
    if (about.magic != SHM_LINK_MAGIC || about.version != SHM_VERSION) return -HXA_E_PROTOCOL;
    if (!capacity_makes_sense(about.capacity)) return -HXA_E_PROTOCOL;
    int status = shm_segment_check(metadata->fds[0], half_bytes(about.capacity));
    if (status != 0) return status;
    uint8_t *base;
    status = shm_segment_map_peer(metadata->fds[0], half_bytes(about.capacity), 1, &base);
    if (status != 0) return status == -HXA_E_RIGHTS ? -HXA_E_PROTOCOL : status;
    shm_half *peer = (shm_half *)(void *)base;
    int bell = metadata->fds[1];
    if (shm_load(&peer->magic) != SHM_HALF_MAGIC || shm_load(&peer->capacity) != about.capacity) status = -HXA_E_PROTOCOL;
    else status = shm_bell_adopt(&bell, link->self->nowait);
    if (status != 0) {
        shm_segment_unmap_peer(base, half_bytes(about.capacity));
        return status;
    }
    const uint64_t most = about.capacity / 4 - 16;
    link->note_bytes = most < link->self->note_bytes ? most : link->self->note_bytes;
    link->peer_capacity = about.capacity;
    link->peer_bell = bell;
    link->peer = peer;
    link->process = shm_process_find(about.pid, about.own_pid);
    /* Still alive, as its pipe shows, so its pid was not reused. */
    if (!shm_bell_held(bell)) shm_process_drop(&link->process, ESRCH);
    shm_store_rel(&link->state, (uint32_t)SHM_UP);
    return 0;
}

int shm_link_connect(hxa_link *link, const hxa_metadata *metadata, hxa_op *op) {
    const int status = join(link, metadata);
    if (status != 0) {
        shm_metadata_close(metadata);
        return shm_refuse(op, status);
    }
    shm_fd_close_foreign(metadata->fds[0]);    /* the mapping keeps the segment; fds[1] is the link's now */
    return HXA_DONE;
}
