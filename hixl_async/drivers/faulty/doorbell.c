#include "doorbell.h"

#include <errno.h>
#include <unistd.h>

void faulty_doorbell_ring(hxa_link *link) {
    const uint64_t one = 1;
    ssize_t written;
    do written = write(link->doorbell, &one, sizeof one);
    while (written < 0 && errno == EINTR);
}

void faulty_doorbell_clear(hxa_link *link) {
    uint64_t rings;
    ssize_t got;
    do got = read(link->doorbell, &rings, sizeof rings);
    while (got < 0 && errno == EINTR);
}
