#include "ring.h"

#include "atomic.h"

typedef struct record {
    uint32_t bytes;                    /* of the whole record */
    uint32_t topic_len;                /* SKIP: the record is filling */
    uint32_t note_len;
    uint32_t unused;
} record;

enum { GRAIN = 16 };
static const uint32_t SKIP = UINT32_MAX;
_Static_assert(sizeof(record) == GRAIN, "positions are multiples of a record header");

static uint64_t padded(uint64_t payload) { return (sizeof(record) + payload + GRAIN - 1) & ~(uint64_t)(GRAIN - 1); }

/* Bytes at the end of the ring that a record of `bytes` must skip. */
static uint64_t skipped(uint32_t capacity, uint64_t head, uint64_t bytes) {
    const uint64_t left = capacity - (head & (capacity - 1));
    return left < bytes ? left : 0;
}

int shm_ring_room(shm_half *half, uint32_t capacity, uint64_t head, uint64_t *tail_seen, uint64_t payload) {
    const uint64_t bytes = padded(payload), need = bytes + skipped(capacity, head, bytes);
    uint64_t tail = shm_load(tail_seen);
    if (capacity - (head - tail) >= need) return SHM_RING_OK;
    const uint64_t now = shm_load_sc(&half->tail);
    if (now - tail > head - tail) return SHM_RING_CORRUPT;      /* went back, or consumed what never was */
    shm_store(tail_seen, now);
    return capacity - (head - now) >= need ? SHM_RING_OK : SHM_RING_FULL;
}

void shm_ring_put(shm_half *half, uint32_t capacity, uint64_t *head, const void *topic, uint32_t topic_len, const void *note,
                  uint32_t note_len) {
    const uint64_t bytes = padded((uint64_t)topic_len + note_len), skip = skipped(capacity, *head, bytes);
    uint8_t *to = shm_half_ring(half) + (*head & (capacity - 1));
    if (skip != 0) {
        const record filling = {.bytes = (uint32_t)skip, .topic_len = SKIP};
        memcpy(to, &filling, sizeof filling);
        to = shm_half_ring(half);
    }
    const record about = {.bytes = (uint32_t)bytes, .topic_len = topic_len, .note_len = note_len};
    memcpy(to, &about, sizeof about);
    if (topic_len) memcpy(to + sizeof about, topic, topic_len);
    if (note_len) memcpy(to + sizeof about + topic_len, note, note_len);
    *head += skip + bytes;
    shm_store_sc(&half->head, *head);
}

int shm_ring_get(shm_half *half, uint32_t capacity, uint64_t *tail, uint64_t head, uint64_t note_bytes, uint8_t *text,
                 uint32_t *topic_len, uint32_t *note_len) {
    for (;;) {
        const uint64_t ready = head - *tail;
        if (ready == 0) return SHM_RING_EMPTY;
        if (ready > capacity || ready % GRAIN != 0) return SHM_RING_CORRUPT;
        const uint64_t at = *tail & (capacity - 1), left = capacity - at, most = ready < left ? ready : left;
        record *from = (record *)(void *)(shm_half_ring(half) + at);
        /* Atomic loads, so that the compiler can't fetch a checked value a second time. */
        const uint32_t bytes = shm_load(&from->bytes), topic = shm_load(&from->topic_len), note = shm_load(&from->note_len);
        if (topic == SKIP) {
            if (bytes != left || left > ready) return SHM_RING_CORRUPT;
            *tail += left;
            continue;
        }
        const uint64_t payload = (uint64_t)topic + note;
        if (payload > note_bytes || bytes != padded(payload) || bytes > most) return SHM_RING_CORRUPT;
        memcpy(text, from + 1, payload);
        *topic_len = topic;
        *note_len = note;
        *tail += bytes;
        return SHM_RING_OK;
    }
}
