#include "doorbell.h"

#include <unistd.h>

#include "hxa_retry.h"

/* The counter cannot overflow, and a doorbell that did not ring has nothing to clear. */
void faulty_doorbell_ring(hxa_link *link) {
    const uint64_t one = 1;
    const ssize_t written = HXA_RETRY(write(link->doorbell, &one, sizeof one));
    (void)written;
}

void faulty_doorbell_clear(hxa_link *link) {
    uint64_t rings;
    const ssize_t got = HXA_RETRY(read(link->doorbell, &rings, sizeof rings));
    (void)got;
}
