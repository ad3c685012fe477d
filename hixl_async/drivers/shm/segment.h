/* Segments: memory without a name that travels as a descriptor.
 *
 * Ours are memfds, allocated up front (so that a full machine is an error here and not a SIGBUS later), sealed against
 * changes of size, and of mode 0400, so that a reader cannot reopen its descriptor for writing.  Those of a peer are trusted
 * only as far as the kernel confirms what they are.
 *
 * What the seals do not forbid: as long as peers may write to a segment, each process that may do so can punch holes into it,
 * because the seals that forbid that (F_SEAL_WRITE, F_SEAL_FUTURE_WRITE) would also forbid the peers to map it for writing.
 * A process that touches a hole gets a page of zeros, which the kernel allocates at that moment and charges to the memory cgroup
 * of that process.  It does not get SIGBUS, because no limit of the file system applies to memfds.  So the pages that a peer
 * writes may be charged to that peer, and a peer that may write can erase data that it could overwrite anyway.  A segment that no
 * peer may write to has F_SEAL_FUTURE_WRITE, and no holes.
 */
#ifndef SHM_SEGMENT_H
#define SHM_SEGMENT_H

#include "base.h"

/* Round up to whole pages; 0 if that overflows. */
SHM_INTERNAL uint64_t shm_pages(uint64_t bytes);

/* Make a memfd of whole pages, not sealed yet.  Return 0 or a refusal. */
SHM_INTERNAL int shm_segment_create(const char *name, uint64_t bytes, int *fd);

/* Fix the size for ever; read_only (once our own mapping exists) also forbids any new way of writing. */
SHM_INTERNAL int shm_segment_seal(int fd, int read_only);

/* Check that the descriptor of a peer is a segment of at least `bytes` whose pages exist and whose size is fixed. */
SHM_INTERNAL int shm_segment_check(int fd, uint64_t bytes);

/* Map our own memory, which children keep; and memory that is shared with a peer, which they do not.  Return 0 or a refusal. */
SHM_INTERNAL int shm_segment_map(int fd, uint64_t bytes, uint8_t **base);
SHM_INTERNAL int shm_segment_map_peer(int fd, uint64_t bytes, int writable, uint8_t **base);
SHM_INTERNAL void shm_segment_unmap(uint8_t *base, uint64_t bytes);
SHM_INTERNAL void shm_segment_unmap_peer(uint8_t *base, uint64_t bytes);

/* Take the page faults of a mapping now.  Return 0 or the errno.  Never changes a byte: a write fault stores nothing. */
SHM_INTERNAL int shm_segment_populate(uint8_t *base, uint64_t bytes, int writable);

/* Make a descriptor of the same segment that can only read: reopened, because dup would share the right to write. */
SHM_INTERNAL int shm_segment_reader(int fd, int *reader);

#endif /* SHM_SEGMENT_H */
