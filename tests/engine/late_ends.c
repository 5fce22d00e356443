/* Preloaded: what C++ does at the end of a thread comes late, and the end of the
 * process takes so long that it comes within that. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

typedef void (*end_t)(void *);
typedef int (*registrar)(end_t, void *, void *);

struct late {
    end_t end;
    void *object;
};

static void end_late(void *given) {
    struct late one = *(struct late *)given;
    free(given);
    usleep(300000);
    one.end(one.object);
}

int __cxa_thread_atexit_impl(end_t end, void *object, void *dso) {
    registrar real = (registrar)dlsym(RTLD_NEXT, "__cxa_thread_atexit_impl");
    struct late *one = malloc(sizeof *one);
    one->end = end;
    one->object = object;
    return real(end_late, one, dso);
}

__attribute__((destructor)) static void linger(void) {
    usleep(1000000);
}
