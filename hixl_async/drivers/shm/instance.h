/* An opened driver. */
#ifndef SHM_INSTANCE_H
#define SHM_INSTANCE_H

#include "pool.h"

struct hxa_instance {
    hxa_sink sink;
    uint64_t inline_bytes, chunk_bytes, stream_bytes, note_bytes;
    uint32_t capacity;                 /* of a ring */
    uint32_t waiting_limit;            /* most notifications of a link that may wait for room */
    uint32_t nowait;                   /* preadv2(RWF_NOWAIT) works on pipes */
    hxa_link *links;
    hxa_mem *memories;
    uint8_t *text;                     /* one notification, private, while poll hands it out */
    hxa_stats loop;                    /* written by the loop only, and all gauges */
    hxa_stats others;                  /* written by any thread, with locked adds */
    shm_pool pool;
};

#endif /* SHM_INSTANCE_H */
