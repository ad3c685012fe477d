#include "doorbell.h"

#include "link.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

int shm_bell_new(int *write_end, int *read_end) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0) return shm_refusal_of(errno);
    /* One page holds 4,096 unread rings; the default of 16 counts against the user's pipe pages with every link. */
    (void)fcntl(ends[1], F_SETPIPE_SZ, SHM_PAGE);
    (void)fchmod(ends[0], 0444);       /* another user may have to reopen it (shm_bell_adopt), for reading only */
    *read_end = ends[0];
    *write_end = ends[1];
    return 0;
}

/* Tried on a pipe of our own that is empty. */
uint32_t shm_bell_nowait(void) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0) return 0;
    const uint32_t works = shm_bell_clear(ends[0], 1) == 0;
    close(ends[0]);
    close(ends[1]);
    return works;
}

/* Open an anonymous pipe again, for a description of our own.  A named one may lie on a file system whose server never answers. */
static int reopen(int fd) {
    char path[40], name[8];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(path, name, sizeof name);
    if (length < 0) return HXA_REFUSAL(HXA_E_UNSUPPORTED, errno);
    if (length < 6 || memcmp(name, "pipe:[", 6) != 0) return -HXA_E_PROTOCOL;
    const int own = HXA_RETRY(open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    return own < 0 ? -HXA_E_UNSUPPORTED : own;
}

/* The descriptor is read as it will be read later, because its kind alone is no proof: the kernel refuses RWF_NOWAIT for a
 * pipe that was reopened by its path in /proc, for ever, and one that is open for writing too never ends. */
int shm_bell_adopt(int *fd, uint32_t nowait) {
    const int flags = fcntl(*fd, F_GETFL);
    if (fcntl(*fd, F_GETPIPE_SZ) < 0 || flags < 0 || (flags & O_ACCMODE) != O_RDONLY) return -HXA_E_PROTOCOL;
    if (nowait) return shm_bell_clear(*fd, 1) == SHM_BELL_FAULTY ? -HXA_E_PROTOCOL : 0;
    const int own = reopen(*fd);
    if (own < 0) return own;
    close(*fd);
    *fd = own;
    return 0;
}

int shm_bell_held(int fd) {
    struct pollfd end = {.fd = fd, .events = POLLIN};
    return HXA_RETRY(poll(&end, 1, 0)) >= 0 && !(end.revents & (POLLHUP | POLLERR | POLLNVAL));
}

/* Return 1 if a byte went in; a full pipe already holds more wake-ups than are needed. */
static int ring(int fd) {
    const uint8_t byte = 1;
    return HXA_RETRY(write(fd, &byte, 1)) == 1;
}

/* Dekker: we stored what there is to see, then look whether the peer sleeps; it says that it sleeps, then looks again. */
void shm_bell_wake(hxa_link *link) {
    uint32_t *armed = &link->peer->armed;
    if (shm_load_sc(armed) == 0 || shm_swap_sc(armed, 0u) == 0) return;
    if (ring(link->bell)) shm_add(&link->self->others.wakes_sent, 1);
}

ssize_t shm_bell_clear(int fd, uint32_t nowait) {
    uint8_t rings[SHM_PAGE];
    struct iovec into = {rings, sizeof rings};
    const ssize_t got = HXA_RETRY(nowait ? preadv2(fd, &into, 1, -1, RWF_NOWAIT) : read(fd, rings, sizeof rings));
    if (got > 0) return got;
    if (got == 0) return SHM_BELL_CLOSED;
    return errno == EAGAIN ? 0 : SHM_BELL_FAULTY;
}
