#include "library.hpp"

#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "hxa_driver.h"

namespace hx {

bool abi::operator<(const Text &a, const Text &b) { return std::strcmp(text_of(&a), text_of(&b)) < 0; }

namespace {

constexpr const char *HIXL = "libcann_hixl.so", *METADEF = "libmetadef.so";

#if defined(__aarch64__)
constexpr const char *ARCH = "aarch64-linux";
#else
constexpr const char *ARCH = "x86_64-linux";
#endif

bool folder(const std::string &path) {
    struct stat about;
    return stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
}

bool file(const std::string &path) {
    struct stat about;
    return stat(path.c_str(), &about) == 0 && S_ISREG(about.st_mode);
}

void add_root(std::vector<std::string> &out, const std::string &root) {
    out.push_back(root + "/lib64");
    out.push_back(root + "/" + ARCH + "/lib64");
}

// Folders in which the library may be, best first.
std::vector<std::string> places() {
    std::vector<std::string> out;
    for (const char *name : {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"}) {
        const char *root = std::getenv(name);
        if (root != nullptr && *root != '\0') add_root(out, root);
    }
    std::vector<std::string> bases{"/usr/local/Ascend"};
    const char *home = std::getenv("HOME");
    if (home != nullptr && *home != '\0') bases.push_back(std::string(home) + "/Ascend");
    for (const std::string &base : bases)
        for (const char *kit : {"/cann", "/ascend-toolkit/latest"}) add_root(out, base + kit);
    return out;
}

// The reason of the loader.
std::string why() {
    const char *text = dlerror();
    return text != nullptr ? text : "unknown error";
}

struct Search {
    std::vector<std::string> missing;  // places where there is no such file
    std::string failures;              // files that are there and cannot be used

    void *open(const std::string &path) {
        if (path.find('/') != std::string::npos && !file(path)) {
            missing.push_back(path);
            return nullptr;
        }
        void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) failures += (failures.empty() ? "" : "; ") + why();
        return handle;
    }

    std::string text() const {
        std::string out;
        if (!failures.empty()) out += " Failed: " + failures + ".";
        if (!missing.empty()) {
            out += " Not there:";
            for (const std::string &path : missing) out += (&path == &missing.front() ? " " : ", ") + path;
            out += ".";
        }
        return out;
    }
};

template <class Function>
void find(void *handle, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
}

}  // namespace

int Library::load(const std::string &wanted, std::string &error) {
    Search search;
    std::string where;
    void *hixl = nullptr;
    const auto attempt = [&](const std::string &candidate) {
        hixl = search.open(candidate);
        if (hixl != nullptr) path = candidate;
        return hixl != nullptr;
    };
    if (!wanted.empty()) {
        if (!folder(wanted)) {
            attempt(wanted);
            where = wanted.find('/') != std::string::npos ? wanted.substr(0, wanted.rfind('/')) : "";
        } else {
            for (const std::string &place : {wanted, wanted + "/lib64", wanted + "/" + ARCH + "/lib64"})
                if (attempt((where = place) + "/" + HIXL)) break;
        }
    } else {
        for (const std::string &place : places())
            if (attempt((where = place) + "/" + HIXL)) break;
        if (hixl == nullptr) {
            where.clear();
            attempt(HIXL);
        }
    }
    if (hixl == nullptr) {
        error = std::string("hixl: ") + HIXL + " cannot be loaded; install CANN 8.5 or later (toolkit and ops) and "
                "source its set_env.sh, or name file or folder with the option library." + search.text();
        return -HXA_E_UNSUPPORTED;
    }

    // AscendString lives in libmetadef.so, which libcann_hixl.so needs itself: usually it can be seen through it.
    void *texts = hixl;
    if (dlsym(texts, "_ZN2ge12AscendStringC1EPKcm") == nullptr) {
        texts = where.empty() ? nullptr : search.open(where + "/" + METADEF);
        if (texts == nullptr) texts = search.open(METADEF);
        if (texts == nullptr) {
            error = std::string("hixl: ") + path + " is there but " + METADEF
                    + " is not; install the same version of CANN's metadef." + search.text();
            return -HXA_E_UNSUPPORTED;
        }
    }
    find(texts, "_ZN2ge12AscendStringC1EPKcm", make_text);
    find(texts, "_ZNK2ge12AscendString9GetStringEv", text_of);
    find(hixl, "_ZN4hixl4HixlC1Ev", construct);
    find(hixl, "_ZN4hixl4HixlD1Ev", destroy);
    find(hixl, "_ZN4hixl4Hixl10InitializeERKN2ge12AscendStringERKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE",
         initialize);
    find(hixl, "_ZN4hixl4Hixl8FinalizeEv", finalize);
    find(hixl, "_ZN4hixl4Hixl11RegisterMemERKNS_7MemDescENS_7MemTypeERPv", register_mem);
    find(hixl, "_ZN4hixl4Hixl13DeregisterMemEPv", deregister_mem);
    find(hixl, "_ZN4hixl4Hixl7ConnectERKN2ge12AscendStringEi", connect);
    find(hixl, "_ZN4hixl4Hixl10DisconnectERKN2ge12AscendStringEi", disconnect);
    find(hixl,
         "_ZN4hixl4Hixl13TransferAsyncERKN2ge12AscendStringENS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EE"
         "RKNS_12TransferArgsERPv",
         transfer_async);
    find(hixl, "_ZN4hixl4Hixl17GetTransferStatusERKPvRNS_14TransferStatusE", transfer_status);
    find(hixl, "_ZN4hixl4Hixl10SendNotifyERKN2ge12AscendStringERKNS_10NotifyDescEi", send_notify);
    find(hixl, "_ZN4hixl4Hixl11GetNotifiesERSt6vectorINS_10NotifyDescESaIS2_EE", get_notifies);
    find(hixl, "_ZN4hixl4Hixl17GetTransferStatusERKNS_21GetTransferStatusArgsERSt6vectorINS_14TransferResultESaIS5_EE",
         transfer_statuses);
    find(hixl, "_ZN4hixl4Hixl12ConnectAsyncERKN2ge12AscendStringEi", connect_async);
    find(hixl, "_ZN4hixl4Hixl15DisconnectAsyncERKN2ge12AscendStringEi", disconnect_async);
    find(hixl, "_ZN4hixl4Hixl21GetAsyncConnectStatusERKN2ge12AscendStringERNS_18AsyncConnectStatusE", connect_status);
    find(hixl, "_ZN4hixl4Hixl13GetCapabilityENS_11FeatureTypeERi", capability);
    const struct {
        const char *name;
        bool there;
    } needed[] = {
        {"AscendString", make_text != nullptr && text_of != nullptr},
        {"Hixl", construct != nullptr && destroy != nullptr},
        {"Initialize", initialize != nullptr},
        {"Finalize", finalize != nullptr},
        {"RegisterMem", register_mem != nullptr},
        {"DeregisterMem", deregister_mem != nullptr},
        {"Connect", connect != nullptr},
        {"Disconnect", disconnect != nullptr},
        {"TransferAsync", transfer_async != nullptr},
        {"GetTransferStatus", transfer_status != nullptr},
        {"SendNotify", send_notify != nullptr},
        {"GetNotifies", get_notifies != nullptr},
    };
    for (const auto &symbol : needed) {
        if (symbol.there) continue;
        error = "hixl: " + path + " has no " + symbol.name + " as this driver calls it; CANN 8.5.0 or later is needed."
                + search.text();
        return -HXA_E_UNSUPPORTED;
    }
    if (connect_async == nullptr || disconnect_async == nullptr || connect_status == nullptr) connect_async = nullptr;
    abi::text_of = text_of;

    for (const char *name : {"libacl_rt.so", "libascendcl.so"}) {
        void *handle = nullptr;
        if (!where.empty() && file(where + "/" + name))
            handle = dlopen((where + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr && wanted.empty()) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) continue;
        Acl found;
        find(handle, "aclInit", found.init);
        find(handle, "aclrtSetDevice", found.set_device);
        find(handle, "aclrtGetCurrentContext", found.get_context);
        find(handle, "aclrtSetCurrentContext", found.set_context);
        find(handle, "aclrtMallocHost", found.malloc_host);
        find(handle, "aclrtFreeHost", found.free_host);
        find(handle, "aclrtGetSocName", found.soc_name);
        if (found.set_device == nullptr || found.get_context == nullptr || found.set_context == nullptr) continue;
        if (found.malloc_host == nullptr || found.free_host == nullptr) found.malloc_host = nullptr;
        acl = found;
        break;
    }
    return 0;
}

}  // namespace hx
