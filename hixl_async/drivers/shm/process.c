#include "process.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "procfs.h"

enum { TEXT_BYTES = 4096 };

static int alive(int pidfd) {
    struct pollfd process = {.fd = pidfd, .events = POLLIN};
    return HXA_RETRY(poll(&process, 1, 0)) == 0;
}

/* The last number of a line, which is that of the innermost namespace. */
static long last_number(const char *line) {
    long number = 0;
    for (char *end; *line != '\n'; line = end) {
        const long next = strtol(line, &end, 10);
        if (end == line) break;
        number = next;
    }
    return number;
}

/* The process behind a pidfd: its number in /proc, which may be that of another pid namespace, and the number that it has for
 * itself.  Return 0 or the errno. */
static int identify(int pidfd, long *in_proc, long *own) {
    char path[40], text[TEXT_BYTES];
    int error;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
    if (!shm_file_read(path, text, sizeof text, &error)) return error;
    const char *number = shm_line_find(text, "Pid:"), *all = shm_line_find(text, "NSpid:");
    if (number == NULL) return ENOENT;
    *in_proc = strtol(number, NULL, 10);
    *own = all != NULL ? last_number(all) : *in_proc;   /* a kernel without pid namespaces has one number for all */
    return *in_proc > 0 ? 0 : ENOENT;
}

/* Check that the process runs as our user.  The owner of /proc/PID is no proof: it is root for a process that made itself
 * undumpable.  Return 0 or the errno. */
static int same_user(long in_proc) {
    char path[40], text[TEXT_BYTES];
    int error;
    snprintf(path, sizeof path, "/proc/%ld/status", in_proc);
    if (!shm_file_read(path, text, sizeof text, &error)) return error;
    const char *uids = shm_line_find(text, "Uid:");
    unsigned real, effective;
    if (uids == NULL || sscanf(uids, "%u %u", &real, &effective) != 2) return ENOENT;
    return real == geteuid() && effective == geteuid() ? 0 : EPERM;
}

/* Check that process_vm_* work on the process, at an address where no process has memory, so that no page fault follows:
 * the kernel checks the permission first.  Return 0 or the errno. */
static int permitted(pid_t number) {
    uint8_t byte;
    const struct iovec here = {&byte, 1}, there = {(void *)-(uintptr_t)SHM_PAGE, 1};
    if (HXA_RETRY(process_vm_readv(number, &here, 1, &there, 1, 0)) >= 0) return 0;
    return errno == EFAULT ? 0 : errno;
}

shm_process shm_process_find(uint32_t number, uint32_t own_number) {
    shm_process found = SHM_NO_PROCESS;
    if (number == 0 || number > INT32_MAX) return found;
    found.pidfd = (int)syscall(SYS_pidfd_open, (pid_t)number, 0u);
    if (found.pidfd < 0) {
        found.error = errno;
        return found;
    }
    long in_proc = 0, own = 0;
    found.number = (int32_t)number;
    found.error = identify(found.pidfd, &in_proc, &own);
    if (found.error == 0 && own != (long)own_number) found.error = ESRCH;
    if (found.error == 0) found.error = same_user(in_proc);
    if (found.error == 0) found.error = permitted((pid_t)number);
    if (found.error == 0 && !alive(found.pidfd)) found.error = ESRCH;
    if (found.error != 0) shm_process_drop(&found, found.error);
    return found;
}

void shm_process_drop(shm_process *process, int error) {
    if (process->pidfd >= 0) close(process->pidfd);
    process->pidfd = -1;
    process->error = error;
}

/* process_vm_* know a process by its number, which passes to another one some time after the process has died.  What was read
 * counts only if the process still lives afterwards.  A write must not begin once it has died; for it to reach another process,
 * the peer would have to die, be waited for, and its number be given to a process of the same user between the two calls. */
ssize_t shm_process_move(const shm_process *process, uint32_t verb, const struct iovec *here, const struct iovec *there,
                         unsigned long n) {
    ssize_t got;
    if (verb == HXA_WRITE) {
        if (!alive(process->pidfd)) return -ESRCH;
        got = HXA_RETRY(process_vm_writev(process->number, here, n, there, n, 0));
        return got > 0 ? got : got == 0 ? -EFAULT : -errno;
    }
    got = HXA_RETRY(process_vm_readv(process->number, here, n, there, n, 0));
    const int error = got < 0 ? errno : EFAULT;
    if (!alive(process->pidfd)) return -ESRCH;
    return got > 0 ? got : -error;
}
