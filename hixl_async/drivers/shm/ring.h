/* Notification records: one producer, one consumer, in memory that both can write.
 *
 * head and tail count bytes and never wrap; a record is 16 bytes of header, topic, note, padded to 16, and never crosses the
 * end of the ring: what is left there is skipped.  Each side keeps its own counter to itself and believes the other's only
 * within limits.  Nothing is parsed where the other side can still change it.
 */
#ifndef SHM_RING_H
#define SHM_RING_H

#include "half.h"

enum { SHM_RING_FULL = 0, SHM_RING_EMPTY = 0, SHM_RING_OK = 1, SHM_RING_CORRUPT = -1 };

/* Producer: return OK if there is room for a record, FULL, or CORRUPT if the other side's tail makes no sense. */
SHM_INTERNAL int shm_ring_room(shm_half *half, uint32_t capacity, uint64_t head, uint64_t *tail_seen, uint64_t payload);

/* Producer: append a record; only after room answered OK. */
SHM_INTERNAL void shm_ring_put(shm_half *half, uint32_t capacity, uint64_t *head, const void *topic, uint32_t topic_len,
                               const void *note, uint32_t note_len);

/* Consumer: take the record at *tail, head being a snapshot.  OK: topic and note lie in text, one behind the other. */
SHM_INTERNAL int shm_ring_get(shm_half *half, uint32_t capacity, uint64_t *tail, uint64_t head, uint64_t note_bytes,
                              uint8_t *text, uint32_t *topic_len, uint32_t *note_len);

#endif /* SHM_RING_H */
