/* The shared half of a link: made by one side (the owner), written by the other (the producer). */
#ifndef SHM_HALF_H
#define SHM_HALF_H

#include "base.h"

enum { SHM_HALF_MAGIC = 0x464c4853, SHM_RING_MAX = 64 << 20 };

typedef struct shm_half {
    /* Hardly ever written, so that every submit reads it from its own cache. */
    uint32_t magic;
    uint32_t capacity;                 /* bytes of the ring behind this header; a power of two */
    uint32_t fence;                    /* owner -> producer: stop touching my memory */
    /* The producer's. */
    _Alignas(SHM_LINE) uint64_t head;  /* bytes of records ever published */
    uint64_t signals;                  /* signals ever stored into the owner's memory */
    uint32_t want_space;               /* ring my bell when tail moves; the owner clears it */
    uint32_t fenced;                   /* the answer to fence */
    uint32_t gone;                     /* the producer stopped the link, and never touches the owner's memory again */
    /* The owner's. */
    _Alignas(SHM_LINE) uint64_t tail;  /* bytes of records ever consumed */
    /* Both: the owner sets it before it sleeps, and the side that rings its bell clears it. */
    _Alignas(SHM_LINE) uint32_t armed;
} shm_half;

_Static_assert(sizeof(shm_half) <= SHM_PAGE, "the header of a half is one page");

static inline uint8_t *shm_half_ring(shm_half *half) { return (uint8_t *)half + SHM_PAGE; }

#endif /* SHM_HALF_H */
