/* A test aid, not part of kvstrata: no user should load it.
 *
 * The published x86-64 wheels of memcache_hybrid and memfabric_hybrid 1.3.0 are built for machines with an Ascend
 * device. Even their host_shm path, which moves bytes between processes of one host and needs no device, looks for
 * the driver first. Loaded before those libraries, this answers what they ask the driver, so that the tests can
 * run the real MetaService and LocalService anywhere. Bytes that host_shm moves go through memcpy.
 *
 * The names are the libraries' own C++ symbols in 1.3.0; another release needs another look.
 */
#include <dlfcn.h>
#include <string.h>

#define STANDS_FOR(symbol) __asm__(symbol)

enum { FINE = 0, SOME_DEVICE_KIND = 1 };

static void set_int(const char *symbol, int value)
{
    int *place = dlsym(RTLD_DEFAULT, symbol);
    if (place != NULL)
        *place = value;
}

static int copy_on_the_host(void *to, unsigned long room, const void *from, unsigned long size, int direction)
{
    (void)direction;
    if (size > room)
        return -1;
    memcpy(to, from, size);
    return FINE;
}

int address_space_check(void) STANDS_FOR("_ZN3ock2mf14HalGvaPrecheckEv");
int address_space_check(void) { return FINE; }

int load_driver(const void *path, unsigned int version) STANDS_FOR("_ZN3ock2mf5DlApi11LoadLibraryERKSsj");
int load_driver(const void *path, unsigned int version)
{
    (void)path, (void)version;
    void **copy = dlsym(RTLD_DEFAULT, "_ZN3ock2mf8DlAclApi12pAclrtMemcpyE");
    if (copy != NULL)
        *copy = (void *)copy_on_the_host;
    return FINE;
}

int map_device_memory(unsigned short device, unsigned long size, unsigned long *base, int kind, void **memory)
    STANDS_FOR("_ZN3ock2mf17hybm_init_hbm_gvaEtmRmNS0_13AscendSocTypeEPPv");
int map_device_memory(unsigned short device, unsigned long size, unsigned long *base, int kind, void **memory)
{
    (void)device, (void)size, (void)kind, (void)memory;
    if (base != NULL)
        *base = 0;
    return FINE;
}

int ask_device(int device) STANDS_FOR("_ZN3ock2mf10MemSegment14InitDeviceInfoEi");
int ask_device(int device)
{
    set_int("_ZN3ock2mf10MemSegment8socType_E", SOME_DEVICE_KIND);
    set_int("_ZN3ock2mf10MemSegment9deviceId_E", device);
    char *is_known = dlsym(RTLD_DEFAULT, "_ZN3ock2mf10MemSegment16deviceInfoReady_E");
    if (is_known != NULL)
        *is_known = 1;
    return FINE;
}

int device_kind(void) STANDS_FOR("_ZN3ock2mf8DlAclApi16GetAscendSocTypeEv");
int device_kind(void) { return SOME_DEVICE_KIND; }

int choose_device(void) STANDS_FOR("_ZN3ock2mf16MemEntityDefault18SetThreadAclDeviceEv");
int choose_device(void) { return FINE; }

int copy_between_hosts(void *self, void *to, const void *from, unsigned long size)
    STANDS_FOR("_ZN3ock2mf17HostDataOpHostShm14CopyHostToHostEPvPKvm");
int copy_between_hosts(void *self, void *to, const void *from, unsigned long size)
{
    (void)self;
    memcpy(to, from, size);
    return FINE;
}
