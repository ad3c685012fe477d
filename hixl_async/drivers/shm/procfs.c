#include "procfs.h"

#include <fcntl.h>
#include <unistd.h>

int shm_file_read(const char *path, char *text, size_t size, int *error) {
    size_t used = 0;
    const int fd = HXA_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) {
        *error = errno;
        return 0;
    }
    ssize_t got;
    do got = HXA_RETRY(read(fd, text + used, size - 1 - used));
    while (got > 0 && (used += (size_t)got) < size - 1);
    *error = got < 0 ? errno : 0;
    close(fd);
    text[used] = '\0';
    return *error == 0;
}

const char *shm_line_find(const char *text, const char *key) {
    const size_t length = strlen(key);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, key, length) == 0) return line + length;
    }
    return NULL;
}
