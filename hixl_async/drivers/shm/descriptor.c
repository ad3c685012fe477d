#include "descriptor.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

int shm_fd_duplicate(int fd, int *copy) {
    *copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return *copy < 0 ? shm_refusal_of(errno) : 0;
}

void shm_fd_close(int fd) {
    if (fd >= 0) close(fd);
}

static void *close_slowly(void *fd) {
    close((int)(intptr_t)fd);
    return NULL;
}

/* Closing asks the file behind a descriptor (FUSE's flush, a lingering socket), and a hostile one may not answer: only kinds that
 * cannot wait are closed here, others by a thread of their own, which is never joined. */
void shm_fd_close_foreign(int fd) {
    if (fd < 0) return;
    if (fcntl(fd, F_GET_SEALS) >= 0 || fcntl(fd, F_GETPIPE_SZ) >= 0) {
        close(fd);
        return;
    }
    pthread_attr_t detached;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, &detached, close_slowly, (void *)(intptr_t)fd) != 0) close(fd);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

void shm_metadata_close(const hxa_metadata *metadata) {
    for (uint32_t i = 0; i < metadata->nfds && i < HXA_METADATA_FDS; i++) shm_fd_close_foreign(metadata->fds[i]);
}
